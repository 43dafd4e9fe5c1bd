"""What a session's shell writes into the store: each change is tried until it is answered, or time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from galley.core.answer.codec import encode_ending
from galley.core.errors import GalleyError
from galley.core.records import encode_records
from galley.core.session import events as ev
from galley.core.session.ports import Clock
from galley.core.store import KvDirectory
from services.gateway.clock import SECOND
from services.gateway.session.timeouts import Timeouts, patiently
from services.gateway.store.owned import OwnedSession
from services.gateway.telemetry.observer import request_observer
from services.gateway.telemetry.spans import COMMIT, RENEW

_T = TypeVar("_T")


class StoreWrites:
    """Of one session; the machine is told what came of each, by `tell`."""

    def __init__(
        self,
        owned: OwnedSession,
        clock: Clock,
        timeouts: Timeouts,
        deadline_ns: int | None,
        tell: Callable[[ev.Event], None],
    ) -> None:
        """`deadline_ns` is the call's, a time of the clock; None for none."""
        self._owned = owned
        self._clock = clock
        self._timeouts = timeouts
        self._deadline_ns = deadline_ns
        self._tell = tell
        self._observer = request_observer()

    async def commit(self, effect: ev.Commit, directory: KvDirectory) -> None:
        """Append to the log; `directory` is who caches the session now."""
        meta = encode_records(effect.records)
        began_ns = self._clock.now_ns()

        async def commit() -> int:
            return await self._owned.commit(effect.expected_len, effect.tokens, meta, directory)

        error = await self._write(COMMIT, commit, ev.Committed)
        length = effect.expected_len + len(effect.tokens)
        self._observer.committed(length, self._clock.now_ns() - began_ns, error)

    async def finish(self, effect: ev.StoreFinish) -> None:
        """End the session."""
        record = encode_ending(effect.ending)

        async def finish() -> None:
            await self._owned.finish(effect.log_len, record)

        await self._write("finish", finish, lambda _: ev.FinishStored())

    async def keep_alive(self) -> None:
        """Renew the session's life in the store, however slow its client is."""
        while True:
            await asyncio.sleep(self._timeouts.renew_ns / SECOND)
            try:
                await self._patiently(RENEW, self._owned.renew)
            except GalleyError as error:
                self._tell(ev.StoreFailed(error))
                return

    async def _write(
        self, operation: str, call: Callable[[], Awaitable[_T]], event: Callable[[_T], ev.Event]
    ) -> GalleyError | None:
        """Tell the machine what came of it; returns the error, if one did."""
        try:
            result = await self._patiently(operation, call)
        except GalleyError as error:
            self._tell(ev.StoreFailed(error))
            return error
        self._tell(event(result))
        return None

    async def _patiently(self, operation: str, call: Callable[[], Awaitable[_T]]) -> _T:
        until_ns = self._timeouts.store_deadline_ns(self._clock.now_ns(), self._deadline_ns)
        return await patiently(operation, call, until_ns, self._clock)

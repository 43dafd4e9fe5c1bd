"""The token log of one session as its owner writes it: each change is retried until the store responds.

A store that comes back without its latest writes, or empty, may not hold a session that is served here. The
owner has all of it. It recreates the session with the prompt alone, with its own epoch and nonce; the next
change then reports how much of the log is missing (`LogBehind`), and the machine commits that again.

Two rules keep that safe. A session is recreated only where there is none: an owner that created or claimed
the session since is found there, and this owner is fenced. And it is recreated only if the store held it so
recently that it cannot have expired since, live or finished: a session that was ended elsewhere and has
expired is not recreated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from galley.common.logs import get_logger
from galley.core.answer.answer import encode_ending
from galley.core.errors import GalleyError, StoreUnavailable, UnknownSession
from galley.core.records import encode_records
from galley.core.session import events as ev
from galley.core.session.events import Clock
from galley.core.store import KvDirectory, LogBehind, SessionStore, StoredSession
from services.gateway.clock import MILLISECOND, SECOND, Timeouts
from services.gateway.telemetry.observer import request_observer
from services.gateway.telemetry.spans import COMMIT, RENEW

_T = TypeVar("_T")
_E = TypeVar("_E")
_log = get_logger(__name__)

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.2
LAST_CALL_S = 0.5
"""Time that a call that started in time may take beyond the limit."""


class SessionLog:
    """The log of one session, for one owner. Each change returns its event for the session machine."""

    def __init__(
        self,
        store: SessionStore,
        stored: StoredSession,
        clock: Clock,
        timeouts: Timeouts,
        held_ns: int,
        deadline_ns: int | None = None,
    ) -> None:
        """Take over a session that the store held at `held_ns`; `deadline_ns` is the call's, or None."""
        self.owner = stored.ownership
        self.new = stored.to_new_session()
        self._store = store
        self._clock = clock
        self._timeouts = timeouts
        self._held_ns = held_ns
        self._deadline_ns = deadline_ns
        self._observer = request_observer()

    async def commit(self, effect: ev.Commit, directory: KvDirectory) -> ev.Committed | ev.StoreFailed:
        """Append tokens; `directory` names the replicas that cache the session."""
        meta = encode_records(effect.records)
        started_ns = self._clock.now_ns()
        event = await self._write(
            COMMIT,
            lambda: self._store.commit(
                self.owner, effect.expected_len, effect.tokens, meta, effect.hashes, directory
            ),
            ev.Committed,
        )
        length = effect.expected_len + len(effect.tokens)
        error = event.error if isinstance(event, ev.StoreFailed) else None
        self._observer.committed(length, self._clock.now_ns() - started_ns, error)
        return event

    async def finish(self, effect: ev.StoreFinish) -> ev.FinishStored | ev.StoreFailed:
        record = encode_ending(effect.ending)
        return await self._write(
            "finish",
            lambda: self._store.finish(self.owner, effect.log_len, record, effect.log_hash),
            lambda _: ev.FinishStored(),
        )

    async def keep_alive(self) -> ev.StoreFailed:
        """Renew the session, however slow its client is, until that fails; return the failure."""
        while True:
            await asyncio.sleep(self._timeouts.renew_ns / SECOND)
            failed = await self.renew()
            if failed is not None:
                return failed

    async def renew(self) -> ev.StoreFailed | None:
        return await self._write(RENEW, lambda: self._store.renew(self.owner), lambda _: None)

    async def _write(
        self, operation: str, change: Callable[[], Awaitable[_T]], event: Callable[[_T], _E]
    ) -> _E | ev.StoreFailed:
        until_ns = self._timeouts.store_deadline_ns(self._clock.now_ns(), self._deadline_ns)
        try:
            return event(
                await retry(operation, lambda: self._attempt(change, until_ns), until_ns, self._clock)
            )
        except GalleyError as error:
            return ev.StoreFailed(error)

    async def _attempt(self, change: Callable[[], Awaitable[_T]], until_ns: int) -> _T:
        """Try a change once; recreate the session first if the store has lost it."""
        # The response shows that the store held the session at the time of the request, or later.
        requested_ns = self._clock.now_ns()
        try:
            result = await change()
        except LogBehind:
            self._held_ns = requested_ns
            raise
        except UnknownSession:
            if requested_ns - self._held_ns > self._timeouts.trusted_ns:
                raise
            time = await read_store_time(self._store, self.owner.session_id, self._clock)
            await self._store.recreate(self.owner, self.new, time.latest_ms(until_ns))
            _log.warning("session recreated", session_id=self.owner.session_id)
            result = await change()
        self._held_ns = requested_ns
        return result


@dataclass(frozen=True, slots=True)
class StoreTime:
    """A reading of the store's clock, with the gateway's times of the request and of the response."""

    now_ms: int
    requested_ns: int
    received_ns: int

    def at_ms(self, time_ns: int) -> int:
        """Return the store's time at `time_ns` of the gateway's clock, or a slightly earlier one."""
        return self.now_ms + (time_ns - self.received_ns) // MILLISECOND

    def latest_ms(self, until_ns: int) -> int:
        """Return when a caller that retries until `until_ns` has given up, on the store's clock."""
        return self.at_ms(max(self.requested_ns, until_ns) + int(LAST_CALL_S * SECOND))


async def read_store_time(store: SessionStore, session_id: str, clock: Clock) -> StoreTime:
    requested_ns = clock.now_ns()
    now_ms = await store.now_ms(session_id)
    return StoreTime(now_ms, requested_ns, clock.now_ns())


async def retry(operation: str, call: Callable[[], Awaitable[_T]], until_ns: int, clock: Clock) -> _T:
    """Return the result of `call`, repeated until it does not raise StoreUnavailable.

    No attempt starts after `until_ns`. The pause doubles from FIRST_PAUSE_S to LONGEST_PAUSE_S. Raise the
    last StoreUnavailable, or one for the time-out.
    """
    observer, pause_s = request_observer(), FIRST_PAUSE_S
    left_s = max(0.0, (until_ns - clock.now_ns()) / SECOND)
    with observer.store_call(operation) as span:
        try:
            async with asyncio.timeout(left_s + LAST_CALL_S):
                while True:
                    try:
                        return await call()
                    except StoreUnavailable as error:
                        left_s = (until_ns - clock.now_ns()) / SECOND
                        if left_s <= 0:
                            raise
                        observer.store_retried(span, error)
                    await asyncio.sleep(min(pause_s, left_s))
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        except TimeoutError as error:
            raise StoreUnavailable("the session store does not respond") from error

"""A session in the store as its owner changes it: what a store has lost of it altogether is made anew first.

A store that comes back without its last moments, or without anything, may not hold a session that is at work
here. Its owner has all of it. It makes it anew with the prompt alone, as the owner that it was; how much of
the log is missing then, the next change tells, and is written again as ever (`LogBehind`).

Two things keep that safe. It is made only where there is none: whoever has made or claimed the session since
is found there, and this owner is fenced. And it is made only where it was held here so lately that it cannot
have expired since, in whatever state: an answer that was ended elsewhere, and forgotten, does not come back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from galley.common.logs import get_logger
from galley.core.errors import UnknownSession
from galley.core.session.ports import Clock
from galley.core.store import KvDirectory, LogBehind, SessionStore, StoredSession

_T = TypeVar("_T")
_log = get_logger(__name__)


class OwnedSession:
    """Of one owner. Each change is one attempt, and raises as that of `SessionStore` does."""

    def __init__(
        self, store: SessionStore, stored: StoredSession, clock: Clock, held_ns: int, trusted_ns: int
    ) -> None:
        """The store held it at `held_ns`, and keeps whatever it holds for longer than `trusted_ns`."""
        self.owner = stored.ownership
        self.new = stored.to_new_session()
        self._store = store
        self._clock = clock
        self._held_ns = held_ns
        self._trusted_ns = trusted_ns

    async def commit(
        self, expected_len: int, tokens: Sequence[int], meta: bytes, directory: KvDirectory
    ) -> int:
        """The log's length thereafter."""
        return await self._change(
            lambda: self._store.commit(self.owner, expected_len, tokens, meta, directory)
        )

    async def finish(self, expected_len: int, finish: bytes) -> None:
        """End it."""
        await self._change(lambda: self._store.finish(self.owner, expected_len, finish))

    async def renew(self) -> None:
        """Put off its expiry."""
        await self._change(lambda: self._store.renew(self.owner))

    async def _change(self, change: Callable[[], Awaitable[_T]]) -> _T:
        # What is answered later was true when it was asked, or since.
        asked_ns = self._clock.now_ns()
        try:
            result = await change()
        except LogBehind:
            self._held_ns = asked_ns
            raise
        except UnknownSession:
            if asked_ns - self._held_ns > self._trusted_ns:
                raise
            await self._store.recreate(self.owner, self.new)
            _log.warning("the store had lost a session", session_id=self.owner.session_id)
            result = await change()
        self._held_ns = asked_ns
        return result

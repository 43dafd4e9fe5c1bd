"""The simulated store with defects on purpose, each of which a rule must detect (`mutants.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from galley.core.errors import LogLost, UnknownSession
from galley.core.store import (
    KvDirectory,
    LogHashes,
    NewSession,
    Ownership,
    SessionEnded,
    StoredSession,
)
from tests.fakes.owners import hashes_of
from tests.simulation.system.copies import Copies
from tests.simulation.system.redis import Sessions

REFUSED = "the commit is refused, as it is there already"
_NEVER_MS = 10**15


class NoFencing(Sessions):
    """Let earlier owners of a session go on changing it."""

    def _owned(self, owner: Ownership) -> object:  # type: ignore[override]  # as the record is private
        record = self._find(owner.session_id)
        if record is None:
            raise UnknownSession(owner.session_id)
        if record.state == "finished":
            raise SessionEnded(owner.session_id)
        return record


class Unconditional(Sessions):
    """Give a session to any call that comes, as before decision 028."""

    async def create(self, new: NewSession, nonce: bytes, latest_ms: int) -> StoredSession:
        return await super().create(new, nonce, self._now_ms())

    async def claim(self, former: Ownership, principal: str, nonce: bytes, latest_ms: int) -> StoredSession:
        held = await self.read(former.session_id, principal)
        return await super().claim(held.ownership, principal, nonce, self._now_ms())


class AppendsTwice(Sessions):
    """Append the tokens of a repeated commit again."""

    def append(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        hashes: LogHashes,
        directory: KvDirectory,
    ) -> int:
        log = self._owned(owner).tokens
        if len(log) > expected_len:
            expected_len, hashes = len(log), hashes_of(log, tokens)
        return super().append(owner, expected_len, tokens, meta, hashes, directory)


class RefusesRepeats(Sessions):
    """Refuse a repeated commit as if the log were another."""

    def append(self, owner: Ownership, expected_len: int, *rest: Any) -> int:
        if len(self._owned(owner).tokens) > expected_len:
            raise LogLost(REFUSED)
        return super().append(owner, expected_len, *rest)


class LateAborts(Sessions):
    """Abort a session whenever the call arrives."""

    async def abort(self, session_id: str, principal: str, finish: bytes, latest_ms: int) -> None:
        await super().abort(session_id, principal, finish, _NEVER_MS)


class LateDeletes(Sessions):
    """Delete a session whenever the call arrives."""

    async def delete(self, session_id: str, principal: str, latest_ms: int) -> None:
        await super().delete(session_id, principal, _NEVER_MS)


class KeepsDeleted(Sessions):
    """Keep an answer that was finished before it was deleted."""

    async def delete(self, session_id: str, principal: str, latest_ms: int) -> None:
        record = self._find(session_id)
        await super().delete(session_id, principal, latest_ms)
        if record is not None and record.state == "finished":
            self._records[session_id] = record


class ForgetsAborts(Sessions):
    """Forget that a session was aborted when it expires."""

    async def recreate(self, owner: Ownership, new: NewSession, latest_ms: int) -> None:
        if not self.holds(owner.session_id):
            self._aborted.clear()
        await super().recreate(owner, new, latest_ms)


class AnyPrincipal(Sessions):
    """Give the sessions of all principals to each."""

    def _of(self, session_id: str, principal: str) -> Any:
        record = self._find(session_id)
        if record is None:
            raise UnknownSession(session_id)
        return record


class TrustsLogs(Sessions):
    """Compare no hash with the log that is read."""

    async def read(self, session_id: str, principal: str) -> StoredSession:
        with self._believed(session_id):
            return await super().read(session_id, principal)

    async def claim(self, former: Ownership, principal: str, nonce: bytes, latest_ms: int) -> StoredSession:
        with self._believed(former.session_id):
            return await super().claim(former, principal, nonce, latest_ms)

    @contextmanager
    def _believed(self, session_id: str) -> Iterator[None]:
        record = self._find(session_id)
        known = b"" if record is None else record.log_hash
        with mock.patch("tests.fakes.store.prefix_hash", return_value=known):
            yield


class OneForAll(Copies):
    """Take the copy of one replica for that of all."""

    def is_enough(self, offset: int) -> bool:
        return not self.wanted or any(copy.acked >= offset for copy in self.all)

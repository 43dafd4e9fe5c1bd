"""Session stores for measurements: one that answers at once, and one that times another."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from galley.core.errors import UnknownSession
from galley.core.store import UNCHANGED, KvDirectory, NewSession, Ownership, SessionStore, StoredSession

_DURATION = struct.Struct("<q")
_NONCE = bytes(16)


@dataclass(slots=True)
class _Log:
    new: NewSession
    tokens: list[int] = field(default_factory=list)
    meta: bytearray = field(default_factory=bytearray)


class InstantStore(SessionStore):
    """A store that costs nothing: sessions in this process, each with one owner.

    It keeps logs in memory and answers each call at once.
    """

    def __init__(self) -> None:
        self._logs: dict[str, _Log] = {}

    async def ping(self) -> None:
        """Return at once."""

    async def create(self, new: NewSession, nonce: bytes | None = None) -> StoredSession:
        """Create a session; an existing one of the same id is replaced."""
        self._logs[new.session_id] = _Log(new, list(new.prompt))
        return StoredSession(
            Ownership(new.session_id, 1, nonce or _NONCE),
            new.principal,
            new.fields,
            len(new.prompt),
            list(new.prompt),
        )

    async def claim(self, session_id: str, principal: str, nonce: bytes | None = None) -> StoredSession:
        """Return the session; raise UnknownSession if it is not the principal's."""
        log = self._logs.get(session_id)
        if log is None or log.new.principal != principal:
            raise UnknownSession(session_id)
        made = await self.create(log.new, nonce)
        return replace(made, tokens=list(log.tokens), meta=bytes(log.meta))

    async def commit(
        self,
        owner: Ownership,
        expected_len: int,  # noqa: ARG002  # nobody else writes
        tokens: Sequence[int],
        meta: bytes,
        directory: KvDirectory = UNCHANGED,  # noqa: ARG002  # nobody resumes
    ) -> int:
        """Append to the log in memory."""
        log = self._logs[owner.session_id]
        log.tokens += tokens
        log.meta += meta
        return len(log.tokens)

    async def finish(self, owner: Ownership, expected_len: int, finish: bytes) -> None:  # noqa: ARG002
        """Drop the session's log."""
        self._logs.pop(owner.session_id, None)

    async def recreate(self, owner: Ownership, new: NewSession) -> None:
        """Do nothing: no session is ever lost."""

    async def renew(self, owner: Ownership) -> None:
        """Return at once; sessions do not expire."""

    async def abort(self, session_id: str, principal: str, finish: bytes) -> None:  # noqa: ARG002
        """Drop the session's log."""
        self._logs.pop(session_id, None)

    async def close(self) -> None:
        """Return at once; nothing is open."""


class TimedStore(SessionStore):
    """A wrapper of a store that appends the duration of each commit to a file, for `read_ms`.

    The log adds this duration to a token's latency: the token is confirmed when its commit is called, and
    emitted once the call returns.
    """

    def __init__(self, store: SessionStore, out: Path) -> None:
        self._store = store
        self._out = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    async def ping(self) -> None:
        await self._store.ping()

    async def create(self, new: NewSession, nonce: bytes | None = None) -> StoredSession:
        return await self._store.create(new, nonce)

    async def claim(self, session_id: str, principal: str, nonce: bytes | None = None) -> StoredSession:
        return await self._store.claim(session_id, principal, nonce)

    async def commit(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        directory: KvDirectory = UNCHANGED,
    ) -> int:
        """Call the timed store and write the time of the call."""
        began_ns = time.perf_counter_ns()
        length = await self._store.commit(owner, expected_len, tokens, meta, directory)
        os.write(self._out, _DURATION.pack(time.perf_counter_ns() - began_ns))
        return length

    async def finish(self, owner: Ownership, expected_len: int, finish: bytes) -> None:
        await self._store.finish(owner, expected_len, finish)

    async def recreate(self, owner: Ownership, new: NewSession) -> None:
        await self._store.recreate(owner, new)

    async def renew(self, owner: Ownership) -> None:
        await self._store.renew(owner)

    async def abort(self, session_id: str, principal: str, finish: bytes) -> None:
        await self._store.abort(session_id, principal, finish)

    async def close(self) -> None:
        """Close the other store and the file."""
        await self._store.close()
        os.close(self._out)


def read_ms(path: Path, start: int) -> tuple[list[float], int]:
    """Return the milliseconds of each commit in the file from byte `start` on, and where they end."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    whole = len(data) - len(data) % _DURATION.size
    return [ns / 1e6 for (ns,) in _DURATION.iter_unpack(data[:whole])], start + whole

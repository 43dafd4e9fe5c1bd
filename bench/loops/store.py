"""Session stores for measurements: one that answers at once, and any whose commits are timed."""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from galley.core.errors import UnknownSession
from galley.core.store import (
    UNCHANGED,
    Exchange,
    Exchanged,
    KvDirectory,
    LogHashes,
    NewSession,
    Ownership,
    SessionStore,
    StoredSession,
    TokenBucket,
)

_DURATION = struct.Struct("<q")
_NOBODY = b""


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

    async def now_ms(self, session_id: str) -> int:  # noqa: ARG002  # no call is late
        """Return 0: no time passes."""
        return 0

    async def read(self, session_id: str, principal: str) -> StoredSession:
        """Return the session; raise UnknownSession if it is not the principal's."""
        log = self._logs.get(session_id)
        if log is None or log.new.principal != principal:
            raise UnknownSession(session_id)
        return _stored(log, _NOBODY)

    async def create(self, new: NewSession, nonce: bytes, latest_ms: int) -> StoredSession:  # noqa: ARG002
        """Create a session; an existing one of the same id is replaced."""
        log = self._logs[new.session_id] = _Log(new, list(new.prompt))
        return _stored(log, nonce)

    async def claim(
        self,
        former: Ownership,
        principal: str,
        nonce: bytes,
        latest_ms: int,  # noqa: ARG002
    ) -> StoredSession:
        """Return the session with its new owner."""
        read = await self.read(former.session_id, principal)
        return replace(read, ownership=replace(read.ownership, nonce=nonce))

    def commit(
        self,
        owner: Ownership,
        expected_len: int,  # noqa: ARG002  # nobody else writes
        tokens: Sequence[int],
        meta: bytes,
        hashes: LogHashes,  # noqa: ARG002
        directory: KvDirectory = UNCHANGED,  # noqa: ARG002  # nobody resumes
    ) -> asyncio.Future[int]:
        """Append to the log in memory."""
        log = self._logs[owner.session_id]
        log.tokens += tokens
        log.meta += meta
        length: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        length.set_result(len(log.tokens))
        return length

    async def finish(self, owner: Ownership, expected_len: int, finish: bytes, log_hash: bytes) -> None:  # noqa: ARG002
        """Drop the session's log."""
        self._logs.pop(owner.session_id, None)

    async def recreate(self, owner: Ownership, new: NewSession, latest_ms: int) -> None:
        """Do nothing: no session is ever lost."""

    async def renew(self, owner: Ownership) -> None:
        """Return at once; sessions do not expire."""

    async def abort(self, session_id: str, principal: str, finish: bytes, latest_ms: int) -> None:  # noqa: ARG002
        """Drop the session's log."""
        self._logs.pop(session_id, None)

    async def delete(self, session_id: str, principal: str, latest_ms: int) -> None:  # noqa: ARG002
        """Drop the session's log."""
        self._logs.pop(session_id, None)

    async def exchange(self, bucket: TokenBucket, exchange: Exchange) -> Exchanged:
        """Grant the call; the bucket is always full."""
        return Exchanged(exchange.needed is not None, 0, bucket.burst)

    async def close(self) -> None:
        """Return at once; nothing is open."""


def _stored(log: _Log, nonce: bytes) -> StoredSession:
    new = log.new
    owner = Ownership(new.session_id, 1, nonce)
    meta = bytes(log.meta)
    return StoredSession(owner, new.principal, new.fields, len(new.prompt), list(log.tokens), meta)


def timed(store: SessionStore, out: Path) -> SessionStore:
    """Return the store, whose commits append their duration to a file from now on, for `read_ms`.

    The log adds this duration to a token's latency: the token is confirmed when its commit is called, and
    emitted once the call returns.
    """
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    commit = store.commit

    def timed_commit(*arguments: Any) -> asyncio.Future[int]:
        began_ns = time.perf_counter_ns()
        length = asyncio.ensure_future(commit(*arguments))
        length.add_done_callback(lambda _: os.write(file, _DURATION.pack(time.perf_counter_ns() - began_ns)))
        return length

    store.commit = timed_commit  # type: ignore[assignment]  # of this store alone
    return store


def read_ms(path: Path, start: int) -> tuple[list[float], int]:
    """Return the milliseconds of each commit in the file from byte `start` on, and where they end."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    whole = len(data) - len(data) % _DURATION.size
    return [ns / 1e6 for (ns,) in _DURATION.iter_unpack(data[:whole])], start + whole

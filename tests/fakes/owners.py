"""Calls of a session store as its callers make them: read first, in time, with the hashes of the log."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress

from galley.core.content import prefix_hash
from galley.core.errors import LogLost, UnknownSession
from galley.core.store import (
    UNCHANGED,
    KvDirectory,
    LogHashes,
    NewSession,
    OwnerChanged,
    Ownership,
    SessionStore,
    StoredSession,
)

ALICE = "alice"
_IN_TIME_MS = 60_000


async def in_time(store: SessionStore, session_id: str) -> int:
    return await store.now_ms(session_id) + _IN_TIME_MS


async def create(store: SessionStore, new: NewSession, nonce: bytes = b"") -> StoredSession:
    """Create a session, or claim the one that exists."""
    nonce = nonce or secrets.token_bytes(16)
    stored = await store.create(new, nonce, await in_time(store, new.session_id))
    if stored.ownership.nonce == nonce:
        return stored
    return await store.claim(stored.ownership, new.principal, nonce, await in_time(store, new.session_id))


async def claim(store: SessionStore, session_id: str, principal: str, nonce: bytes = b"") -> StoredSession:
    """Claim a session from whoever owns it."""
    nonce = nonce or secrets.token_bytes(16)
    while True:
        held = await store.read(session_id, principal)
        with suppress(OwnerChanged):
            return await store.claim(held.ownership, principal, nonce, await in_time(store, session_id))


async def commit(
    store: SessionStore,
    owner: Ownership,
    expected_len: int,
    tokens: Sequence[int],
    meta: bytes,
    directory: KvDirectory = UNCHANGED,
) -> int:
    """Commit as an owner whose log is the stored one."""
    hashes = hashes_of((await _log(store, owner))[:expected_len], tokens)
    return await store.commit(owner, expected_len, tokens, meta, hashes, directory)


def hashes_of(log: Sequence[int], tokens: Sequence[int]) -> LogHashes:
    """Return the hashes of `log` before and after `tokens` are appended."""
    return LogHashes(prefix_hash(log), prefix_hash([*log, *tokens]))


async def finish(store: SessionStore, owner: Ownership, expected_len: int, finish: bytes) -> None:
    log_hash = prefix_hash((await _log(store, owner))[:expected_len])
    await store.finish(owner, expected_len, finish, log_hash)


async def recreate(store: SessionStore, owner: Ownership, new: NewSession) -> None:
    await store.recreate(owner, new, await in_time(store, owner.session_id))


async def abort(store: SessionStore, session_id: str, principal: str, finish: bytes) -> None:
    await store.abort(session_id, principal, finish, await in_time(store, session_id))


async def delete(store: SessionStore, session_id: str, principal: str) -> None:
    await store.delete(session_id, principal, await in_time(store, session_id))


async def _log(store: SessionStore, owner: Ownership) -> list[int]:
    with suppress(UnknownSession, LogLost):
        return (await store.read(owner.session_id, ALICE)).tokens
    return []

"""Check the accounting of a KV table against what its sessions hold, hashes included."""

from __future__ import annotations

from collections import Counter

from galley.core.content import SessionKey, block_hashes
from galley.core.kv.session import KvSession
from galley.core.kv.table import KvTable


def check_table(table: KvTable) -> None:
    pool, live = table._pool, list(table._live.values())
    sessions = [*live, *table._idle.values()]
    assert len(sessions) + len(table._evicted) <= table.max_sessions
    references = Counter(block for session in sessions for block in session.blocks)
    pins = Counter(block for session in live for block in session.blocks)
    assert {block: count for block, count in enumerate(pool._references) if count} == references
    assert {block: count for block, count in enumerate(pool._pins) if count} == pins
    assert pool.pinned == len(pins)
    assert sorted([*pool._free, *pool._cached, *references]) == list(range(pool.total))
    registered = {block: name for block, name in enumerate(pool._hashes) if name is not None}
    assert {block: name for name, block in pool._registered.items()} == registered
    assert not registered.keys() & set(pool._free)
    assert registered.keys() >= set(pool._cached)
    for session in sessions:
        _check_session(session)


def _check_session(session: KvSession) -> None:
    pool, block_tokens = session._pool, session._block_tokens
    assert len(session.blocks) * block_tokens >= len(session.tokens)
    assert session.hashes == block_hashes(session.key[0], session.tokens, block_tokens)
    for index, block in enumerate(session.blocks):
        shared, registered = pool.references(block) > 1, pool.is_registered(block)
        assert registered or not shared, "shared, but nobody could have found it"
        assert index <= len(session.hashes) or not (shared or registered), "room that is not its own"


def drop(table: KvTable, key: SessionKey) -> None:
    session = table._session(key)
    if session is not None:
        table._evict(session)
    table._evicted.pop(key, None)

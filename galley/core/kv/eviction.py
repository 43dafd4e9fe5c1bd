"""Who loses its KV blocks where they run short: see the rules of `galley.core.kv.table`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from galley.core.content import SessionKey
from galley.core.errors import Overloaded
from galley.core.kv.blocks import BlockPool
from galley.core.kv.session import KvSession

RETRY_AFTER_S = 1.0


def candidates_for(
    session: KvSession, idle: Iterable[KvSession], live: Iterable[KvSession], busy: frozenset[SessionKey]
) -> Iterator[KvSession]:
    """Who may lose its blocks to the session, in this order; `idle` are in theirs."""
    yield from (other for other in idle if other.key not in busy)
    younger = [other for other in live if other.age > session.age and other.key not in busy]
    yield from sorted(younger, key=lambda other: other.age, reverse=True)


def victims_of(
    session: KvSession, length: int, pool: BlockPool, candidates: Iterator[KvSession]
) -> list[KvSession]:
    """Whom to evict so that `session` can cover `length`; raises Overloaded if nobody's blocks suffice.

    A block that it must copy counts as had once all others that hold it are gone.
    """
    shared = session.shared_if_written(length)
    short = session.missing(length) + (shared is not None) - pool.available
    chosen: list[KvSession] = []
    released: Counter[int] = Counter()
    while short > 0:
        victim = next(candidates, None)
        if victim is None:
            raise Overloaded(f"no room: {short} of {pool.total} blocks are missing", RETRY_AFTER_S)
        chosen.append(victim)
        for block in victim.blocks:
            released[block] += 1
            left = pool.references(block) - released[block]
            short -= left == (1 if block == shared else 0)
    return chosen

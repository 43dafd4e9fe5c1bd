"""The block tables of all sessions of one target replica, over its `BlockPool`.

A session's *length* here is its number of computed tokens: confirmed tokens whose KV lies in its blocks.
Blocks beyond it are room, or hold the KV of draft tokens that were not confirmed; these are never shared or
registered. Rules:

1. A session is live (opened for a request) or idle (kept for its next one). The tokens of a session that has
   lost its blocks are remembered, so that what is still cached can be found again.
2. A full block of computed tokens is registered in the pool by its chained hash, which starts from the
   tenant's salt. `open` attaches registered blocks. `reserve` makes a shared or registered block the
   session's own before it is written: by a copy, or by unregistering it.
3. When blocks run short, cached ones are taken first, then those of idle sessions (longest idle first), then
   those of the youngest live session younger than the caller. So the oldest session always completes.

Calls for a request: `look_up`, `open`; for each step `reserve`, the step, and `append_computed`, `truncate`
as needed; at the end, or if a step failed, `make_idle`. A session whose chunk is
planned or running is in `busy`: only `reserve` may be called for it until the step is over, because its
blocks could go to others that the same step writes. Adding a token costs O(1), or O(block) at a block's end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from galley.core.content import Hit, Miss, PrefixHasher, SessionKey, look_up
from galley.core.errors import Broken, Overloaded
from galley.core.kv.blocks import BlockPool
from galley.core.kv.session import KvSession

# The number of evicted sessions that `take_evicted` reports at most.
_NAMED = 16
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """The `copies` (from, to) of whole blocks that the next step must make before it writes anything.

    If that step never runs, make the session idle. The `preempted`, youngest first, have lost their blocks.
    """

    copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[SessionKey, ...] = ()


@dataclass(frozen=True, slots=True)
class _Evicted:
    """The tokens of the full blocks of a session that has lost them, and their hashes."""

    tokens: list[int]
    hashes: list[bytes]
    prefix: PrefixHasher


class KvTable:
    def __init__(self, blocks: int, block_tokens: int, max_sessions: int) -> None:
        """Create a table of `blocks` blocks of `block_tokens` tokens each. Raise ValueError below 1.

        `max_sessions` bounds the sessions that are live, idle or remembered without blocks. `moved` counts
        the blocks of sessions that were opened or evicted: a thousand take up to a millisecond.
        """
        if block_tokens < 1 or max_sessions < 1:
            raise ValueError(f"block_tokens, max_sessions: must be >= 1, got {block_tokens}, {max_sessions}")
        self.block_tokens = block_tokens
        self.max_sessions = max_sessions
        self._lost: deque[SessionKey] = deque(maxlen=_NAMED)
        self._evicted_before = 0
        self.moved = 0
        self._forget_all(blocks)

    def _forget_all(self, blocks: int) -> None:
        self._pool = BlockPool(blocks)
        self._live: dict[SessionKey, KvSession] = {}
        self._idle: OrderedDict[SessionKey, KvSession] = OrderedDict()  # longest idle first
        self._evicted: OrderedDict[SessionKey, _Evicted] = OrderedDict()  # longest without blocks first

    @property
    def total(self) -> int:
        return self._pool.total

    @property
    def live_blocks(self) -> int:
        """Return the number of blocks that live sessions hold; shared ones count once."""
        return self._pool.pinned

    @property
    def free(self) -> int:
        """Return the number of blocks that no live session holds: empty, cached, or held by idle sessions."""
        return self.total - self.live_blocks

    @property
    def empty(self) -> int:
        return self._pool.empty

    @property
    def evicted_blocks(self) -> int:
        """Return how many cached blocks were dropped for others since the table was created."""
        return self._evicted_before + self._pool.evicted

    def has_blocks(self, key: SessionKey) -> bool:
        return self._session(key) is not None

    def tokens_of(self, key: SessionKey) -> Sequence[int]:
        """Return the tokens of the cached prefix: the session's own list, not to be changed or kept."""
        return self._known(key)[0]

    def hashes_of(self, key: SessionKey) -> Sequence[bytes]:
        """Return the hashes of the full blocks of `tokens_of`, not to be changed or kept."""
        session = self._session(key)
        if session is not None:
            return session.hashes
        evicted = self._evicted.get(key)
        return evicted.hashes[: self._cached_blocks(evicted)] if evicted else ()

    def blocks_of(self, key: SessionKey) -> tuple[int, ...]:
        """Return the session's block table: position p lies in block blocks_of(key)[p // block_tokens]."""
        session = self._session(key)
        return session.block_table if session is not None else ()

    def cached_prefixes(self, limit: int) -> list[bytes]:
        return self._pool.recent_hashes(limit)

    def take_evicted(self) -> tuple[SessionKey, ...]:
        """Return the idle sessions that have lost their blocks since the last call, at most the last 16."""
        evicted = tuple(self._lost)
        self._lost.clear()
        return evicted

    def cached_prefix(self, key: SessionKey) -> Miss:
        tokens, prefix = self._known(key)
        return Miss(len(tokens), prefix.digest(tokens, len(tokens)))

    def look_up(self, key: SessionKey, start: int, tokens: Sequence[int], prefix_hash: bytes) -> Hit | Miss:
        ours, hasher = self._known(key)
        return look_up(ours, start, tokens, prefix_hash, hasher)

    def open(
        self,
        key: SessionKey,
        arrival: int,
        tokens: list[int],
        priority: int = 0,
        hashes: Sequence[bytes] = (),
    ) -> int:
        """Make the session live for these confirmed tokens; return its length. Raise Overloaded.

        It keeps its own KV as far as that agrees, or attaches cached blocks where these reach further; never
        the last token, which is always fed. `arrival` (ns) is the same in every retry; higher `priority`
        counts as older. `hashes` are those of the first blocks of `tokens`, as far as they are known: to
        compute those of a long prompt takes milliseconds.
        """
        session = self._wake(key)
        session.arrival, session.priority = arrival, priority
        session.restore(tokens, hashes)
        self.moved += len(session.blocks)
        return len(session.tokens)

    def make_room(self, lengths: Mapping[SessionKey, int], until: int) -> bool:
        """Evict idle sessions, so that `reserve` need not, until these live ones can cover these lengths.

        Return False if `moved` reaches `until` first: call it again.
        """
        missing = sum(self._live[key].missing(length) for key, length in lengths.items())
        while self._idle and self._pool.available < missing:
            if self.moved >= until:
                return False
            self._evict(next(iter(self._idle.values())))
        return True

    def reserve(self, key: SessionKey, length: int, busy: Container[SessionKey] = ()) -> Reservation:
        """Give the live session blocks for [0, length), its own from its present length on (rule 3).

        Raises Overloaded, having changed nothing, if there are not enough, and Broken if it is not live.
        """
        session = self._live.get(key)
        if session is None:
            raise Broken(f"session {key[1]!r} is not live")
        candidates = _eviction_candidates(session, self._idle.values(), self._live.values(), busy)
        victims = _choose_victims(session, length, self._pool, candidates)
        preempted = tuple(victim.key for victim in victims if victim.live)
        for victim in victims:
            self._evict(victim)
        return Reservation(session.grow(length), preempted)

    def append_computed(self, key: SessionKey, tokens: Sequence[int]) -> None:
        """Record after a step that the KV of the session's next `tokens`, maybe none, is computed.

        Raises Broken if the session has no blocks, or `reserve` did not give it the room.
        """
        session = self._session(key)
        if session is None:
            raise Broken(f"session {key[1]!r} was computed but holds no blocks")
        session.append_computed(tokens)

    def truncate(self, key: SessionKey, length: int) -> None:
        session = self._session(key)
        if session is not None:
            session.truncate(length)

    def distrust(self, blocks: Collection[int]) -> None:
        """Forget what lies in these blocks, after a step that was to move tokens within them has failed.

        Sessions keep what is before them. No step may be running.
        """
        for block in blocks:
            self._pool.distrust(block)
        for session in (*self._live.values(), *self._idle.values()):
            session.distrust(blocks)

    def make_idle(self, key: SessionKey) -> None:
        """Make the session idle: it keeps the blocks of its computed tokens until they are needed.

        What a step that failed or never ran was to write is dropped, with a block that was to be copied.
        """
        session = self._live.pop(key, None)
        if session is None:
            return
        session.roll_back()
        session.set_live(False)
        if session.blocks:
            self._idle[key] = session

    def clear(self) -> None:
        """Forget everything: the content of the blocks is in doubt."""
        self._evicted_before = self.evicted_blocks
        self._forget_all(self.total)

    def _session(self, key: SessionKey) -> KvSession | None:
        return self._live.get(key) or self._idle.get(key)

    def _known(self, key: SessionKey) -> tuple[Sequence[int], PrefixHasher]:
        session = self._session(key)
        if session is not None:
            return session.tokens, session.prefix
        evicted = self._evicted.get(key)
        if evicted is None:
            return (), PrefixHasher()
        return evicted.tokens[: self._cached_blocks(evicted) * self.block_tokens], evicted.prefix

    def _cached_blocks(self, evicted: _Evicted) -> int:
        """Return how many of its blocks, from the first on, are still cached."""
        for index, block_hash in enumerate(evicted.hashes):
            if self._pool.find(block_hash) is None:
                return index
        return len(evicted.hashes)

    def _wake(self, key: SessionKey) -> KvSession:
        """Return the session, live, created if needed. Raise Overloaded if there is no slot for a new one."""
        session = self._session(key)
        if session is None:
            self._make_place()
            session = KvSession(key, self._pool, self.block_tokens)
            self._evicted.pop(key, None)
        session.roll_back()
        session.set_live(True)
        self._idle.pop(key, None)
        self._live[key] = session
        self._bound_evicted()
        return session

    def _make_place(self) -> None:
        if len(self._live) >= self.max_sessions:
            raise Overloaded(f"all {self.max_sessions} sessions are live", _RETRY_AFTER_S)
        if len(self._live) + len(self._idle) >= self.max_sessions:
            self._evict(next(iter(self._idle.values())))

    def _evict(self, session: KvSession) -> None:
        if not session.live:
            self._lost.append(session.key)
        self._live.pop(session.key, None)
        self._idle.pop(session.key, None)
        self.moved += len(session.blocks)
        tokens, hashes, prefix = session.surrender()
        if tokens:
            self._evicted[session.key] = _Evicted(tokens, hashes, prefix)
            self._bound_evicted()

    def _bound_evicted(self) -> None:
        room = self.max_sessions - len(self._live) - len(self._idle)
        while len(self._evicted) > room:
            self._evicted.popitem(last=False)


def _eviction_candidates(
    session: KvSession, idle: Iterable[KvSession], live: Iterable[KvSession], busy: Container[SessionKey]
) -> Iterator[KvSession]:
    """Yield the sessions to evict for `session`: `idle` in order, then younger live ones, youngest first."""
    yield from (other for other in idle if other.key not in busy)
    younger = [other for other in live if other.age > session.age and other.key not in busy]
    yield from sorted(younger, key=lambda other: other.age, reverse=True)


def _choose_victims(
    session: KvSession, length: int, pool: BlockPool, candidates: Iterator[KvSession]
) -> list[KvSession]:
    """Return the sessions to evict so that `session` can cover `length`. Raise Overloaded if all are too few.

    A block that the session must copy counts as gained once nobody else holds it.
    """
    shared = session.shared_if_written(length)
    short = session.missing(length) + (shared is not None) - pool.available
    chosen: list[KvSession] = []
    released: Counter[int] = Counter()
    while short > 0:
        victim = next(candidates, None)
        if victim is None:
            raise Overloaded(f"KV memory is full: {short} of {pool.total} blocks are missing", _RETRY_AFTER_S)
        chosen.append(victim)
        released.update(victim.blocks)
        short -= pool.count_released(victim.blocks, released)
        if shared is not None and pool.references(shared) - released[shared] == 1:
            short -= shared in victim.blocks
    return chosen

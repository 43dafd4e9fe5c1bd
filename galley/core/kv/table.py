"""Whose KV lies in which blocks: the sessions of one target replica over its `BlockPool`.

A session *stands* at a number of tokens: that many confirmed tokens have their KV in its blocks. Beyond these
its blocks may hold room, or the KV of draft tokens that nobody confirmed; that is never shared or registered.

- A session is live (opened for an item) or idle (kept for its next item). Of one that has lost its blocks to
  others the tokens are remembered: what of them is still cached can be told, and had back.
- A full block of standing tokens is registered in the pool by its chained hash, which starts from the
  tenant's salt. `open` attaches what is registered, whole blocks. A block that others hold too, or that is
  registered, is made the session's own before `reserve` lets it be written: by a copy, or by forgetting its
  hash.
- Where blocks run short, cached ones go first, then those of idle sessions (longest idle first), then those
  of the youngest live session that is younger than the one that asks. So the oldest always completes.

The order of calls for an item: `look_up`, `open`, then for each pass `reserve`, the pass, and `computed` (or
`distrust` if the pass failed), `truncate` as it likes, and at the end `idle`. A session whose chunk is
planned or under way is in `busy` and must not be opened, truncated, made idle or dropped until its pass is
over: its blocks could go to others that the same pass writes. No clock, no threads. A step of a session that
adds a token costs O(1), and O(block) when a block gets full.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from galley.core.content import Hit, Miss, PrefixHasher, SessionKey, look_up
from galley.core.errors import Broken, Overloaded
from galley.core.kv.blocks import BlockPool
from galley.core.kv.session import KvSession

# Evicted sessions that are named, should nobody ask for a while.
_NAMED = 16
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """What `reserve` did.

    `copies` (from, to) of whole blocks must be carried out before anything is written, by the next pass, all
    those of a plan in the order of their reservations; if that pass never runs, `distrust` the session. They
    are not named again. The `preempted` sessions, youngest first, have lost their blocks and are not live.
    """

    copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[SessionKey, ...] = ()


@dataclass(frozen=True, slots=True)
class _Evicted:
    """What is remembered of a session without blocks: the tokens of its full blocks, and their hashes."""

    tokens: list[int]
    hashes: list[bytes]


class KvTable:
    """The block tables of all sessions of a replica; see the module for the rules."""

    def __init__(self, blocks: int, block_tokens: int, max_sessions: int) -> None:
        """`blocks` of `block_tokens` tokens each, never more; raises ValueError on a number below 1.

        `max_sessions` bounds what is kept: live, idle, and remembered without blocks.
        """
        if block_tokens < 1 or max_sessions < 1:
            raise ValueError(f"block_tokens {block_tokens}, max_sessions {max_sessions}: at least 1 each")
        self.block_tokens = block_tokens
        self._max_sessions = max_sessions
        self._lost: deque[SessionKey] = deque(maxlen=_NAMED)
        self._evicted_before = 0
        self._forget_all(blocks)

    def _forget_all(self, blocks: int) -> None:
        self._pool = BlockPool(blocks)
        self._live: dict[SessionKey, KvSession] = {}
        self._idle: OrderedDict[SessionKey, KvSession] = OrderedDict()  # longest idle first
        self._evicted: OrderedDict[SessionKey, _Evicted] = OrderedDict()  # longest without blocks first

    # What there is.

    @property
    def total(self) -> int:
        """All blocks."""
        return self._pool.total

    @property
    def live_blocks(self) -> int:
        """Blocks that live sessions hold, shared ones counted once."""
        return self._pool.pinned

    @property
    def free(self) -> int:
        """Blocks to be had without touching a live session: never used, cached, or idle sessions'."""
        return self.total - self.live_blocks

    @property
    def empty(self) -> int:
        """Blocks that hold nothing; of the free ones, the others can be had back by content."""
        return self._pool.empty

    @property
    def evicted_blocks(self) -> int:
        """Cached blocks whose content went to make room, since the table was made."""
        return self._evicted_before + self._pool.evicted

    def has_blocks(self, key: SessionKey) -> bool:
        """Whether the session holds any, live or idle."""
        return self._session(key) is not None

    def is_live(self, key: SessionKey) -> bool:
        """Whether the session was opened, and not made idle, dropped or preempted since."""
        return key in self._live

    def tokens_of(self, key: SessionKey) -> Sequence[int]:
        """The tokens that `look_up` and `held` speak of: after a Hit, the first `start` are the caller's.

        The very list of a session that has blocks: not to be changed, and not to be kept over a change.
        """
        return self._known(key)[0]

    def blocks_of(self, key: SessionKey) -> tuple[int, ...]:
        """The session's block table: position p lies in block blocks_of(key)[p // block_tokens]."""
        session = self._session(key)
        return session.block_table if session is not None else ()

    def cached_prefixes(self, limit: int) -> list[bytes]:
        """Up to `limit` hashes of blocks that a new session could attach, most recently used first."""
        return self._pool.recent_hashes(limit)

    def take_evicted(self) -> tuple[SessionKey, ...]:
        """The last idle sessions that have lost their blocks to others since this was asked."""
        evicted = tuple(self._lost)
        self._lost.clear()
        return evicted

    def cached_prefix(self, key: SessionKey) -> Miss:
        """The session's longest prefix that is in its blocks, or still cached: what a cache_miss says."""
        tokens, prefix = self._known(key)
        return Miss(len(tokens), prefix.digest(tokens, len(tokens)))

    def look_up(self, key: SessionKey, start: int, tokens: Sequence[int], prefix_hash: bytes) -> Hit | Miss:
        """`content.look_up` over what is `held` of the session, not hashing all of it. Changes nothing."""
        ours, hasher = self._known(key)
        return look_up(ours, start, tokens, prefix_hash, hasher)

    # What an item does.

    def open(self, key: SessionKey, arrival: int, tokens: Sequence[int], priority: int = 0) -> int:
        """Makes the session live for these confirmed tokens; returns at how many of them it stands.

        It keeps its own KV as far as that agrees, or attaches whole cached blocks where these go further; at
        most len(tokens) - 1, for the last confirmed token is always fed. Takes no block. `arrival` (ns) is
        when the session first came, the same in every retry; the higher `priority` counts as older. Raises
        Overloaded if `max_sessions` are live.
        """
        session = self._wake(key)
        session.arrival, session.priority = arrival, priority
        session.restore(tokens)
        return len(session.tokens)

    def reserve(self, key: SessionKey, length: int, busy: frozenset[SessionKey] = frozenset()) -> Reservation:
        """Gives the live session blocks for [0, length), its own from its standing on.

        Takes cached blocks, then those of idle sessions, then preempts live ones that are younger than this;
        never a session in `busy`. Raises Overloaded if that would not be enough, having changed nothing, and
        Broken if the session is not live.
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
        """A pass is over: the KV of `tokens`, confirmed and next after those it stood at, now stands too.

        May be empty. Registers the blocks that got full. Raises Broken if the session has no blocks, or
        `reserve` did not give it the room.
        """
        session = self._session(key)
        if session is None:
            raise Broken(f"session {key[1]!r} was computed but holds no blocks")
        session.append_computed(tokens)

    def truncate(self, key: SessionKey, length: int) -> None:
        """The session stands at `length` tokens at most; blocks wholly beyond `length` are returned."""
        session = self._session(key)
        if session is not None:
            session.truncate(length)

    def roll_back(self, key: SessionKey) -> None:
        """Its pass failed or never ran: what stood before stands, but for a block that was to be copied."""
        session = self._session(key)
        if session is not None:
            session.roll_back()

    def make_idle(self, key: SessionKey) -> None:
        """No item stands: the session keeps the blocks of what it stands at until somebody needs them."""
        session = self._live.pop(key, None)
        if session is None:
            return
        session.roll_back()
        session.set_live(False)
        if session.blocks:
            self._idle[key] = session

    def drop(self, key: SessionKey) -> None:
        """Forgets the session; its full blocks stay cached."""
        session = self._session(key)
        if session is not None:
            self._remove(session)
        self._evicted.pop(key, None)

    def clear(self) -> None:
        """Forgets everything, and begins anew: what lies in the blocks is in doubt."""
        self._evicted_before = self.evicted_blocks
        self._forget_all(self.total)

    def check(self) -> None:
        """Recomputes all accounting, hashes included; raises Broken if it does not balance. For tests."""
        sessions = [*self._live.values(), *self._idle.values()]
        self._pool.check(
            Counter(block for session in sessions for block in session.blocks),
            Counter(block for session in self._live.values() for block in session.blocks),
        )
        if len(sessions) + len(self._evicted) > self._max_sessions:
            raise Broken("more sessions than there may be")
        for session in sessions:
            session.check()

    # How.

    def _session(self, key: SessionKey) -> KvSession | None:
        return self._live.get(key) or self._idle.get(key)

    def _known(self, key: SessionKey) -> tuple[Sequence[int], PrefixHasher]:
        """The tokens whose KV could be had for the session now, and their hasher."""
        session = self._session(key)
        if session is not None:
            return session.tokens, session.prefix
        evicted = self._evicted.get(key)
        return self._still_cached(evicted) if evicted else (), PrefixHasher()

    def _still_cached(self, evicted: _Evicted) -> Sequence[int]:
        for index, block_hash in enumerate(evicted.hashes):
            if self._pool.find(block_hash) is None:
                return evicted.tokens[: index * self.block_tokens]
        return evicted.tokens

    def _wake(self, key: SessionKey) -> KvSession:
        """The session, live, new if need be; raises Overloaded if there is no place for a new one."""
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
        if len(self._live) >= self._max_sessions:
            raise Overloaded(f"all {self._max_sessions} sessions are live", _RETRY_AFTER_S)
        if len(self._live) + len(self._idle) >= self._max_sessions:
            self._evict(next(iter(self._idle.values())))

    def _remove(self, session: KvSession) -> None:
        session.truncate(0)
        self._live.pop(session.key, None)
        self._idle.pop(session.key, None)

    def _evict(self, session: KvSession) -> None:
        """Takes its blocks; remembers what may stay cached."""
        if not session.live:
            self._lost.append(session.key)
        hashes = list(session.hashes)
        tokens = session.tokens[: len(hashes) * self.block_tokens]
        self._remove(session)
        if tokens:
            self._evicted[session.key] = _Evicted(tokens, hashes)
            self._bound_evicted()

    def _bound_evicted(self) -> None:
        room = self._max_sessions - len(self._live) - len(self._idle)
        while len(self._evicted) > room:
            self._evicted.popitem(last=False)


def _eviction_candidates(
    session: KvSession, idle: Iterable[KvSession], live: Iterable[KvSession], busy: frozenset[SessionKey]
) -> Iterator[KvSession]:
    """Who may lose its blocks to the session, in this order; `idle` are in theirs."""
    yield from (other for other in idle if other.key not in busy)
    younger = [other for other in live if other.age > session.age and other.key not in busy]
    yield from sorted(younger, key=lambda other: other.age, reverse=True)


def _choose_victims(
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
            raise Overloaded(f"no room: {short} of {pool.total} blocks are missing", _RETRY_AFTER_S)
        chosen.append(victim)
        for block in victim.blocks:
            released[block] += 1
            left = pool.references(block) - released[block]
            short -= left == (1 if block == shared else 0)
    return chosen

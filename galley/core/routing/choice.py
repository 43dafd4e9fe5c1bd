"""Which replica of a pool a session goes to: where its tokens are cached, else where least is done.

Of targets: everything is weighed in one unit, tokens of prefill. A cached prefix saves its length; every
session that has work there costs LOAD_TOKENS; and blocks that the session needs and the replica has not free
cost the tokens in them, for someone there will have to compute those again. So a cached prefix is worth some
crowding only.

Of drafts: a session stays with the one that has its tokens for as long as that is fit, and a new one goes
where the fewest sessions are. What a draft caches is cheap to compute again, so nothing is weighed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from galley.core.content import block_hashes
from galley.core.session.ports import Replica
from galley.core.store import CacheLocation

LOAD_TOKENS = 64
"""What a session that is being served costs a newcomer, in tokens of prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLease:
    """What a replica of either pool says of itself; it is believed for as long as the lease lasts.

    `incarnation` names one life of its process; `queue_depth` counts the sessions with work to do.
    `draining`: it takes no new sessions.
    """

    address: str
    incarnation: str
    model: str
    tokenizer_hash: str
    vocab_size: int
    max_draft_tokens: int = 0
    queue_depth: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLease(ReplicaLease):
    """Of a target. `fingerprint` names the build that its bits depend on.

    `cached_prefixes` are chained hashes of whole cached blocks (`galley.core.content.block_hashes`).
    """

    fingerprint: str
    context_window: int
    eos_token_ids: tuple[int, ...] = ()
    deterministic: bool = False
    dtype: str = ""
    device: str = ""
    ranks: int = 1
    kv_block_tokens: int = 0
    kv_blocks_free: int = 0
    kv_blocks_total: int = 0
    cached_prefixes: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLease(ReplicaLease):
    """Of a draft; its `model` may be none. `sessions` counts those that asked it within the last seconds."""

    strategies: tuple[str, ...] = ()
    default_strategy: str = ""
    sessions: int = 0


@dataclass(frozen=True, slots=True)
class TargetCandidate:
    """A target that could be asked; `sessions` is how many of the caller's own are there now.

    A lease is some time old: the caller's own sessions are counted so that those that come at once do not all
    go to the same replica. `up`: the caller has nothing against it; others are for when there is no such.
    """

    lease: TargetLease
    sessions: int = 0
    is_healthy: bool = True

    @property
    def load(self) -> int:
        """Sessions with work to do, as far as is known."""
        return max(self.lease.queue_depth, self.sessions)


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A session in search of a target.

    `tokens` are what it has so far, as far as they are known from position 0. `fingerprint` is the build that
    computed them, empty for a new one; `held` is where the directory says that its KV is.
    """

    tokens: Sequence[int]
    max_position: int
    tenant_salt: bytes = b""
    fingerprint: str = ""
    cached_at: CacheLocation | None = None


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A draft that could be asked; `sessions` is how many of the caller's own asked it of late.

    `up`: the caller has nothing against it; others are for when there is no such.
    """

    lease: DraftLease
    sessions: int = 0
    is_healthy: bool = True

    def is_home(self, home: Replica | None) -> bool:
        """Whether this life of this replica has the session's tokens."""
        return home is not None and (home.address, home.incarnation) == (
            self.lease.address,
            self.lease.incarnation,
        )


def choose_draft(
    strategy: str,
    candidates: Sequence[DraftCandidate],
    home: Replica | None = None,
    avoid: Collection[str] = (),
) -> DraftCandidate | None:
    """The draft for a session that asks for `strategy` (empty: any) and whose tokens `home` has.

    None if none offers it. One that drains keeps the sessions that it has while there is no other; an address
    in `avoid` is chosen only where that leaves no other.
    """
    able = [c for c in candidates if strategy in {"", *c.lease.strategies}]
    able = [c for c in able if not c.lease.draining or c.is_home(home)]
    able = [c for c in able if c.is_healthy and not c.lease.draining] or able
    able = [c for c in able if c.lease.address not in avoid] or able
    at_home = [c for c in able if c.is_home(home)]
    return min(at_home or able, key=_draft_rank, default=None)


def _draft_rank(candidate: DraftCandidate) -> tuple[int, int, str]:
    """The fewest sessions, then the shortest queue; then any fixed order will do."""
    lease = candidate.lease
    return max(lease.sessions, candidate.sessions), lease.queue_depth, lease.address


def choose_target(
    wanted: RoutingRequest, candidates: Sequence[TargetCandidate], avoid: Collection[str] = ()
) -> TargetCandidate | None:
    """The best of those that can serve the session; None if none can, and never one that drains.

    While one of the session's own fingerprint is up, it is one of those, whatever their load (rule 3).
    An address in `avoid` is chosen only where that leaves no other.
    """
    able = [c for c in candidates if not c.lease.draining and c.lease.context_window >= wanted.max_position]
    able = [c for c in able if c.is_healthy] or able
    if wanted.fingerprint:
        able = [c for c in able if c.lease.fingerprint == wanted.fingerprint] or able
    able = [c for c in able if c.lease.address not in avoid] or able
    if len(able) < 2:  # so that one replica costs no hashing
        return able[0] if able else None
    return max(able, key=lambda candidate: _rank(wanted, candidate))


def cached_tokens(wanted: RoutingRequest, lease: TargetLease) -> int:
    """How many of the first tokens the replica need not compute; the last one's logits it always must."""
    held = wanted.cached_at
    known = 0
    if held is not None and (held.replica, held.incarnation) == (lease.address, lease.incarnation):
        known = held.kv_len
    cached = _cached_prefix(wanted, lease)
    return min(max(known, cached), max(0, len(wanted.tokens) - 1))


def score(wanted: RoutingRequest, candidate: TargetCandidate) -> int:
    """What the replica is worth to the session, in tokens of prefill; see the module."""
    saved = cached_tokens(wanted, candidate.lease)
    return saved - LOAD_TOKENS * candidate.load - _short_tokens(wanted, candidate.lease, saved)


def _rank(wanted: RoutingRequest, candidate: TargetCandidate) -> tuple[int, int, int, str]:
    """Ties go to the less busy, then to the one with more room; then any fixed order will do."""
    lease = candidate.lease
    return score(wanted, candidate), -candidate.load, lease.kv_blocks_free, lease.address


def _cached_prefix(wanted: RoutingRequest, lease: TargetLease) -> int:
    if not lease.cached_prefixes or lease.kv_block_tokens < 1:
        return 0
    hashes = block_hashes(wanted.tenant_salt, wanted.tokens, lease.kv_block_tokens)
    # A block's hash names all that comes before it, so the last one that is known is the answer.
    for count in range(len(hashes), 0, -1):
        if hashes[count - 1] in lease.cached_prefixes:
            return count * lease.kv_block_tokens
    return 0


def _short_tokens(wanted: RoutingRequest, lease: TargetLease, saved: int) -> int:
    """The tokens in blocks that must be taken from others; none where the replica does not tell of blocks."""
    if lease.kv_block_tokens < 1:
        return 0
    needed = -(-(len(wanted.tokens) - saved) // lease.kv_block_tokens)
    return max(0, needed - lease.kv_blocks_free) * lease.kv_block_tokens

"""Choose a replica for a session: where its tokens are cached, or else the least busy one.

Targets are weighed in tokens of prefill. A cached prefix saves its length, and every session with work there
costs LOAD_TOKENS. Blocks that the session needs beyond the free ones cost their tokens, because another
session will have to compute those again. A session stays with the draft that has its tokens; a new one goes
where the fewest sessions are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from galley.core.content import chain_start, next_block_hash
from galley.core.grammar.spec import GrammarSpec
from galley.core.session.events import Replica
from galley.core.store import CacheLocation
from galley.core.versions.split import Split

LOAD_TOKENS = 64
"""Cost of each session at a target, in tokens of prefill."""
_FEW, _DRAWN = 4, 2
"""Most candidates that are all compared; how many of more are drawn."""
_SPARE_SESSIONS, _TIMES_OTHERS = 4, 2
"""Sessions that a draft of the stable version has beyond so many times those of a draft of another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLease:
    """A replica's registration, valid until it expires.

    `incarnation` identifies one run of its process. `queue_depth` is the number of open requests. A
    `draining` replica takes no new sessions.
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
    """A target's lease. `cached_prefixes` are chained hashes of cached blocks (`content.block_hashes`).

    `trees`: it takes trees of draft tokens; others take chains.
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
    weights_digest: str = ""
    lora_adapters: tuple[str, ...] = ()
    grammar_kinds: tuple[str, ...] = ()
    trees: bool = False

    def offers(self, lora: str, grammar: GrammarSpec | None = None) -> bool:
        """Return True if it serves the LoRA adapter (empty: the model itself) and decodes by the grammar.

        A target of an earlier version names no kinds of grammars. It would decode without one.
        """
        if grammar is not None and grammar.kind not in self.grammar_kinds:
            return False
        return not lora or lora in self.lora_adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLease(ReplicaLease):
    """A draft's lease; `model` may be empty. `sessions` counts those of the last seconds.

    `version` names its weights, by which sessions are split (`galley.core.versions.split`); empty: none.
    `weights_digest` is that of the weights, in hex digits; empty: unknown, or none.
    """

    strategies: tuple[str, ...] = ()
    default_strategy: str = ""
    sessions: int = 0
    version: str = ""
    max_load_bytes: int = 0
    weights_digest: str = ""


@dataclass(frozen=True, slots=True)
class TargetCandidate:
    """A target that could serve; `sessions` is how many of the caller's own sessions are there now.

    A lease is some time old: without this count, sessions that start together would all choose one replica.
    """

    lease: TargetLease
    sessions: int = 0
    is_healthy: bool = True

    @property
    def load(self) -> int:
        return max(self.lease.queue_depth, self.sessions)


CandidateT = TypeVar("CandidateT", bound="TargetCandidate | DraftCandidate")


class HashedTokens:
    """A session's tokens so far, as far as known; each of its blocks is hashed once, for all replicas.

    Hashing 100,000 tokens takes 10 ms, so the caller does it beforehand, in steps.
    """

    def __init__(self, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Take tokens, which may be replaced by more or fewer of the same session, and its cache salt."""
        self.tokens = tokens
        self._salt = salt
        self._blocks: dict[int, dict[bytes, int]] = {}
        """By the size of blocks: how many first blocks each hash stands for, in order."""

    def hash_blocks(self, block_tokens: int, most: int | None = None) -> bool:
        """Hash at most `most` further blocks (None: all). Return True once all are hashed."""
        blocks = self._blocks.setdefault(block_tokens, {})
        count = len(self.tokens) // block_tokens
        end = count if most is None else min(count, len(blocks) + most)
        last = next(reversed(blocks), None) or chain_start(self._salt)
        for index in range(len(blocks), end):
            last = next_block_hash(last, self.tokens[index * block_tokens : (index + 1) * block_tokens])
            blocks[last] = index + 1
        return end == count

    def cached_tokens(self, prefixes: Iterable[bytes], block_tokens: int) -> int:
        """Return how many first tokens the cached `prefixes` cover, as far as blocks were hashed."""
        blocks = self._blocks.get(block_tokens, {})
        # A block's hash stands for all before it, so the last known one is the answer.
        return max((blocks.get(prefix, 0) for prefix in prefixes), default=0) * block_tokens


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A session that needs a target.

    `fingerprint` is the build that computed its `prefix`, empty for a new session. `cached_at` is where the
    KV directory says that its KV is. `lora` names its LoRA adapter; empty: none. `session_id` decides which
    of many replicas are compared. Its output is bound by `grammar`, if there is one.
    """

    prefix: HashedTokens
    max_position: int
    fingerprint: str = ""
    cached_at: CacheLocation | None = None
    lora: str = ""
    session_id: str = ""
    grammar: GrammarSpec | None = None

    @property
    def tokens(self) -> Sequence[int]:
        return self.prefix.tokens


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    lease: DraftLease
    sessions: int = 0
    is_healthy: bool = True

    @property
    def load(self) -> int:
        return max(self.lease.sessions, self.sessions)

    def is_home(self, home: Replica | None) -> bool:
        return home is not None and (home.address, home.incarnation) == (
            self.lease.address,
            self.lease.incarnation,
        )


def _compared(
    candidates: Sequence[CandidateT], session_id: str, rank: Callable[[CandidateT], int] = lambda _: 0
) -> Sequence[CandidateT]:
    """Return the candidates among which a session chooses: all if they are few, else two at random.

    A lease is up to a second old. If all gateways chose the least busy of many replicas by it, all sessions
    of that second would go there. The lesser of two random ones is nearly as good, and is another one for
    each session (Mitzenmacher 2000, "How useful is old information?"). Two of the lowest rank come first.
    """
    if len(candidates) <= _FEW:
        return candidates
    drawn = sorted(candidates, key=lambda c: _drawn(session_id, c.lease.address))
    return [*drawn[:_DRAWN], *sorted(drawn, key=rank)[:_DRAWN]]


def _drawn(session_id: str, address: str) -> bytes:
    # A checksum would not do: it draws neighbours together.
    return blake2b(f"{session_id} {address}".encode(), digest_size=8).digest()


def choose_draft(
    strategy: str,
    candidates: Sequence[DraftCandidate],
    home: Replica | None = None,
    avoid: Collection[str] = (),
    session_id: str = "",
    split: Split | None = None,
    *,
    is_canary: bool = False,
) -> DraftCandidate | None:
    """Return the draft for a session that requests `strategy` (empty: any) and whose tokens `home` has.

    `session_id` decides which of many are compared. Return None if none offers it. A draining one keeps its
    sessions while there is no other. An address in `avoid` is chosen only if there is no other.

    Then come versions that the split gives to others: the canary's for other sessions, which rather try a
    draft in `avoid` again, and at last drained ones. A canary's session takes any other version first. Others
    leave the stable version if its drafts have more sessions than twice those of the least busy other one.
    """
    able = [c for c in candidates if strategy in {"", *c.lease.strategies}]
    able = [c for c in able if not c.lease.draining or c.is_home(home)]
    able = [c for c in able if c.is_healthy and not c.lease.draining] or able
    if split is not None:
        able = [c for c in able if c.lease.version not in split.drained] or able
        if split.canary and not is_canary:
            able = [c for c in able if c.lease.version != split.canary] or able
    able = [c for c in able if c.lease.address not in avoid] or able
    if split is not None and (arm := split.canary if is_canary else split.stable):
        own = [c for c in able if c.lease.version == arm]
        able = own if own and (is_canary or not _is_crowded(own, able)) else able
    at_home = [c for c in able if c.is_home(home)]
    # The fewest sessions, then the shortest queue; the address makes the order total.
    return min(
        at_home or _compared(able, session_id),
        key=lambda c: (c.load, c.lease.queue_depth, c.lease.address),
        default=None,
    )


def _is_crowded(own: Sequence[DraftCandidate], able: Sequence[DraftCandidate]) -> bool:
    """Return True if the drafts of the stable version have too many sessions, beside others that have few.

    A version that was promoted may have a single draft yet.
    """
    others = [c.load for c in able if c not in own]
    return bool(others) and min(c.load for c in own) >= _SPARE_SESSIONS + _TIMES_OTHERS * min(others)


def choose_target(
    request: RoutingRequest, candidates: Sequence[TargetCandidate], avoid: Collection[str] = ()
) -> TargetCandidate | None:
    """Return the best target that can serve the session, or None; never one that is draining.

    The choice is among healthy ones of the session's own fingerprint while there are any, whatever their
    load. An address in `avoid` is chosen only if there is no other.
    """
    able = [c for c in candidates if not c.lease.draining and c.lease.context_window >= request.max_position]
    able = [c for c in able if c.lease.offers(request.lora, request.grammar)]
    able = [c for c in able if c.is_healthy] or able
    if request.fingerprint:
        able = [c for c in able if c.lease.fingerprint == request.fingerprint] or able
    able = [c for c in able if c.lease.address not in avoid] or able
    if len(able) < 2:  # no need to hash for a single replica
        return able[0] if able else None
    compared = _compared(able, request.session_id, lambda c: -cached_tokens(request, c.lease))
    # The best score, then less load, then more free blocks; the address makes the order total.
    return max(compared, key=lambda c: (_score(request, c), -c.load, c.lease.kv_blocks_free, c.lease.address))


def cached_tokens(request: RoutingRequest, lease: TargetLease) -> int:
    """Return how many of the first tokens the replica need not compute; it always computes the last."""
    held = request.cached_at
    known = 0
    if held is not None and (held.replica, held.incarnation) == (lease.address, lease.incarnation):
        known = held.kv_len
    cached = request.prefix.cached_tokens(lease.cached_prefixes, lease.kv_block_tokens)
    return min(max(known, cached), max(0, len(request.tokens) - 1))


def _score(request: RoutingRequest, candidate: TargetCandidate) -> int:
    """Return the worth of the replica to the session, in tokens of prefill."""
    saved = cached_tokens(request, candidate.lease)
    return saved - LOAD_TOKENS * candidate.load - _short_tokens(request, candidate.lease, saved)


def _short_tokens(request: RoutingRequest, lease: TargetLease, saved: int) -> int:
    """Return the tokens in blocks that other sessions must give up; 0 if the replica reports no blocks."""
    if lease.kv_block_tokens < 1:
        return 0
    needed = -(-(len(request.tokens) - saved) // lease.kv_block_tokens)
    return max(0, needed - lease.kv_blocks_free) * lease.kv_block_tokens

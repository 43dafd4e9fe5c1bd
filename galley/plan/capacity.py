"""Compute what a load needs: sessions, targets, drafts, gateways and memory, by the model of `core.cost`.

A target replica serves n sessions at once. Each step verifies k draft tokens of each session and confirms E
tokens of it in the mean. So n x E / output_tokens answers end in a step and as many begin; each brings the
part of its prompt that is not cached. A step takes what its rows cost; rows beyond the target's row budget
take further steps. The draft's steps are added as if none overlapped with the target's. By Little's law
(1961), concurrent sessions = answers a second x duration of one.

Gateways and stores compute on one core each. A gateway spends CPU time on each verdict, each token and each
answer. A store spends it on each change: one a verdict, and the begin and the end of an answer. Each gateway
also reads the leases of all replicas of its pool twice a second, which bounds the replicas of a pool.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from galley.core.cost.model import FLAT, MAX_K, RowCostCurve, expected_confirmed
from galley.core.errors import InvalidField, check_range
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.core.scheduler.scheduler import MAX_ROWS
from galley.core.store import FINISHED_TTL_S

STORE_BYTES_A_SESSION = 808
"""Redis memory of a session besides its tokens, measured by `make bench-sessions`."""
STORE_BYTES_A_TOKEN = 4

HINTS_IN_TIME = 0.25
"""The part of what drafts add to a verdict that arrives before the target's step begins, at least.

The rest is drafted while the target works, and too late (`make prove-scale`).
"""
LEASE_READS_PER_S = 2.0
"""How often a gateway reads all leases of its pool (`POLL_S` of its pools of replicas)."""

_MOST_SESSIONS = 4096
_MOST_SPARES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The mean load at the busiest hour. `cached_share` of a prompt is in the KV cache."""

    answers_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_share: float = 0.0
    time_per_output_token_ms: float = math.inf  # at most


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSize:
    """One target replica. `step_ms` is for one row; `kv_tokens` is `galley_kv_blocks` x tokens a block."""

    step_ms: float
    kv_tokens: int
    row_costs: RowCostCurve = FLAT
    max_sessions: int = 64
    max_rows: int = MAX_ROWS
    block_tokens: int = BLOCK_TOKENS

    def rows_ms(self, rows: float) -> float:
        """Return the mean time of `rows` rows, in as many steps as they need."""
        # The curve takes whole rows; a step has a part of one only in the mean.
        of_a_pass = min(math.ceil(rows), self.max_rows)
        return self.step_ms * self.row_costs(of_a_pass) * max(1.0, rows / self.max_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """The KV memory on the devices of one replica.

    `kv_bytes_per_token`, over all devices together, is 2 x layers x KV heads x head size x bytes a number.
    `share` of the devices' memory is used; the rest is for the buffers of a step.
    """

    gpus: int
    gpu_memory_gib: float
    weights_gib: float
    kv_bytes_per_token: int
    share: float = 0.9

    def tokens(self, block_tokens: int = BLOCK_TOKENS) -> int:
        """Return the tokens that fit, in whole blocks. Raises InvalidField if not one block fits."""
        for name, value in (("gpus", self.gpus), ("gpu_memory_gib", self.gpu_memory_gib)):
            check_range(name, value, above=0)
        check_range("block_tokens", block_tokens, least=1)
        check_range("kv_bytes_per_token", self.kv_bytes_per_token, least=1)
        check_range("weights_gib", self.weights_gib, least=0)
        check_range("share", self.share, above=0, most=1)
        usable = self.gpus * self.gpu_memory_gib * self.share
        blocks = int((usable - self.weights_gib) * 2**30 // (self.kv_bytes_per_token * block_tokens))
        if blocks < 1:
            raise InvalidField(
                "weights_gib", f"must leave room for a KV block in {usable:g}, got {self.weights_gib:g}"
            )
        return blocks * block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSize:
    """The draft: its acceptance rate, and the number of its steps that cost one target step."""

    alpha: float
    cost_ratio: float
    max_k: int = 16


NO_DRAFT = DraftSize(alpha=0.0, cost_ratio=math.inf, max_k=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The CPU time of gateways and stores, of one core, as `make bench-gateway` measures it.

    Reading leases may take `lease_share` of a gateway's core.
    """

    gateway_us_per_verdict: float = 100.0
    gateway_us_per_token: float = 67.0
    gateway_ms_per_answer: float = 1.0
    gateway_us_per_lease: float = 100.0
    store_us_per_change: float = 33.0
    store_us_per_lease: float = 8.0
    lease_share: float = 0.05

    @property
    def pool_replicas(self) -> float:
        """Return the most targets and drafts of a pool."""
        return max(1.0, _share(self.lease_share, LEASE_READS_PER_S * self.gateway_us_per_lease / 1e6))

    def gateway_cores(self, answers_per_s: float, tokens_per_s: float, verdicts_per_s: float) -> float:
        """Return the cores that gateways need, besides reading leases."""
        verdicts_us, tokens_us = self.gateway_us_per_verdict, self.gateway_us_per_token
        answers_us = 1000 * self.gateway_ms_per_answer
        return (verdicts_per_s * verdicts_us + tokens_per_s * tokens_us + answers_per_s * answers_us) / 1e6

    def store_cores(self, answers_per_s: float, verdicts_per_s: float, lease_reads_per_s: float) -> float:
        """Return the cores that stores need."""
        changes_per_s = verdicts_per_s + 2 * answers_per_s
        return (changes_per_s * self.store_us_per_change + lease_reads_per_s * self.store_us_per_lease) / 1e6


def _share(part: float, of: float) -> float:
    return part / of if of else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Spares:
    """The mean utilization of a replica, and the number of spare replicas of each pool."""

    busy: float = 0.7
    replicas: int = 1
    gateway_sessions: int = 64


@dataclass(frozen=True, slots=True)
class Point:
    """One replica at `sessions` concurrent sessions. `pass_ms` is a step's time, `draft_ms` included."""

    sessions: int
    k: int
    pass_ms: float
    draft_ms: float
    time_per_output_token_ms: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """The needs of a load, spares included. `bound_by` limits a replica: `time`, `kv` or `max_sessions`.

    `gateways_bound_by` is `sessions` or `cpu`. `stores` are masters, without their replicas. All replicas
    and gateways are divided over `pools`, each with spares of its own.
    """

    at: Point
    bound_by: str
    answers_per_s_a_target: float
    tokens_per_s: float
    sessions: float
    targets: int
    drafts: int
    gateways: int
    store_bytes: int
    gateways_bound_by: str
    gateway_cores: float
    stores: int
    store_cores: float
    pools: int


def capacity(
    load: Load, target: TargetSize, draft: DraftSize, spares: Spares, tiers: Tiers = Tiers()
) -> Capacity:
    """Return what `load` needs. Raises InvalidField if a number is out of bounds or one session too much."""
    _check_all(load, target, draft, spares, tiers)
    at, bound_by = _fullest(load, target, draft)
    each = at.tokens_per_s / load.output_tokens
    busy = load.answers_per_s / each
    drafting = busy * at.draft_ms / at.pass_ms
    sessions = load.answers_per_s * load.output_tokens * at.time_per_output_token_ms / 1000
    targets = math.ceil(busy / spares.busy - 1e-9)
    drafts = math.ceil(drafting / spares.busy - 1e-9)
    pools = _pools(targets, drafts, spares, tiers)
    targets += spares.replicas * pools
    drafts += spares.replicas * pools if drafts else 0
    tokens_per_s = load.answers_per_s * load.output_tokens
    verdicts_per_s = tokens_per_s / tokens_per_verdict(at)
    gateway_cores = tiers.gateway_cores(load.answers_per_s, tokens_per_s, verdicts_per_s)
    leases_a_gateway = LEASE_READS_PER_S * (targets + drafts) / pools
    # Of several pools none is certain to be small.
    reading = tiers.lease_share if pools > 1 else leases_a_gateway * tiers.gateway_us_per_lease / 1e6
    by_sessions = math.ceil(sessions / (spares.gateway_sessions * spares.busy) - 1e-9)
    by_cpu = math.ceil(gateway_cores / (spares.busy * (1 - reading)) - 1e-9)
    gateways = max(by_sessions, by_cpu, pools) + spares.replicas * pools
    store_cores = tiers.store_cores(load.answers_per_s, verdicts_per_s, gateways * leases_a_gateway)
    return Capacity(
        at=at,
        bound_by=bound_by,
        answers_per_s_a_target=each,
        tokens_per_s=tokens_per_s,
        sessions=sessions,
        targets=targets,
        drafts=drafts,
        gateways=gateways,
        store_bytes=_store_bytes(load, sessions),
        gateways_bound_by="cpu" if by_cpu > by_sessions else "sessions",
        gateway_cores=gateway_cores,
        stores=max(1, math.ceil(store_cores / spares.busy - 1e-9)),
        store_cores=store_cores,
        pools=pools,
    )


def _pools(targets: int, drafts: int, spares: Spares, tiers: Tiers) -> int:
    """Return over how many pools the replicas are divided; each pool holds its spares too."""
    room = tiers.pool_replicas - spares.replicas * (2 if drafts else 1)
    if room < 1:
        raise InvalidField(
            "replicas",
            f"must leave room in a pool of {tiers.pool_replicas:g} targets and drafts, got {spares.replicas}",
        )
    return max(1, math.ceil((targets + drafts) / room - 1e-9))


def tokens_per_verdict(at: Point) -> float:
    """Return the mean tokens of a verdict, fewer than a round confirms whose draft is awaited."""
    return 1 + HINTS_IN_TIME * (at.pass_ms / at.time_per_output_token_ms - 1)


def load_of_streams(streams: int, load: Load, target: TargetSize, draft: DraftSize) -> Load:
    """Return `load` with as many answers a second as keep `streams` open, at full targets.

    Raises InvalidField as `capacity` does.
    """
    check_range("streams", streams, least=1)
    _check_all(load, target, draft, Spares(), Tiers())
    at, _ = _fullest(load, target, draft)
    return replace(load, answers_per_s=1000 * streams / (load.output_tokens * at.time_per_output_token_ms))


def point(load: Load, target: TargetSize, draft: DraftSize, sessions: int) -> Point:
    """Return a replica at `sessions`, with the k of the shortest time per output token."""
    return min(
        (_with_k(load, target, draft, sessions, k) for k in range(draft.max_k + 1)),
        key=lambda at: at.time_per_output_token_ms,
    )


def _with_k(load: Load, target: TargetSize, draft: DraftSize, sessions: int, k: int) -> Point:
    confirmed = expected_confirmed(draft.alpha, k)
    beginning = sessions * confirmed / load.output_tokens
    prompts = beginning * load.prompt_tokens * (1 - load.cached_share)
    draft_ms = target.step_ms * k * target.row_costs(sessions) / draft.cost_ratio
    pass_ms = target.rows_ms(sessions * (k + 1) + prompts) + draft_ms
    return Point(sessions, k, pass_ms, draft_ms, pass_ms / confirmed, 1000 * sessions * confirmed / pass_ms)


def _fullest(load: Load, target: TargetSize, draft: DraftSize) -> tuple[Point, str]:
    """Return a replica with the most sessions that fit, and the limit that it meets."""
    blocks = math.ceil((load.prompt_tokens + load.output_tokens) / target.block_tokens)
    by_kv = target.kv_tokens // target.block_tokens // blocks
    if by_kv < 1:
        needed = blocks * target.block_tokens
        raise InvalidField(
            "kv_tokens", f"must be >= {needed}, what one session takes, got {target.kv_tokens}"
        )
    fullest = point(load, target, draft, 1)
    if fullest.time_per_output_token_ms > load.time_per_output_token_ms:
        raise InvalidField(
            "time_per_output_token_ms",
            f"must be >= {fullest.time_per_output_token_ms:.4g}, what one session alone takes, "
            f"got {load.time_per_output_token_ms:g}",
        )
    for sessions in range(2, min(by_kv, target.max_sessions) + 1):
        at = point(load, target, draft, sessions)
        if at.time_per_output_token_ms > load.time_per_output_token_ms:
            return fullest, "time"
        fullest = at
    return fullest, "kv" if by_kv <= target.max_sessions else "max_sessions"


def _store_bytes(load: Load, sessions: float) -> int:
    kept = sessions + load.answers_per_s * FINISHED_TTL_S
    tokens = load.prompt_tokens + load.output_tokens
    return math.ceil(kept * (STORE_BYTES_A_SESSION + STORE_BYTES_A_TOKEN * tokens))


def _check_all(load: Load, target: TargetSize, draft: DraftSize, spares: Spares, tiers: Tiers) -> None:
    check_range("answers_per_s", load.answers_per_s, above=0)
    check_range("prompt_tokens", load.prompt_tokens, least=1)
    check_range("output_tokens", load.output_tokens, least=1)
    check_range("cached_share", load.cached_share, least=0, most=1)
    if not load.time_per_output_token_ms > 0:  # infinity: as long as it takes
        raise InvalidField("time_per_output_token_ms", f"must be > 0, got {load.time_per_output_token_ms:g}")
    check_range("step_ms", target.step_ms, above=0)
    check_range("kv_tokens", target.kv_tokens, least=1)
    check_range("block_tokens", target.block_tokens, least=1)
    check_range("max_sessions", target.max_sessions, least=1, most=_MOST_SESSIONS)
    check_range("max_rows", target.max_rows, least=1)
    if not draft.cost_ratio > 0:  # infinity: drafts are free
        raise InvalidField("cost_ratio", f"must be > 0, got {draft.cost_ratio:g}")
    check_range("alpha", draft.alpha, least=0, most=1)
    check_range("max_k", draft.max_k, least=0, most=MAX_K)
    check_range("busy", spares.busy, above=0, most=1)
    check_range("replicas", spares.replicas, least=0, most=_MOST_SPARES)
    check_range("gateway_sessions", spares.gateway_sessions, least=1, most=_MOST_SESSIONS)
    for name, value in asdict(tiers).items():
        check_range(name, value, least=0)
    check_range("lease_share", tiers.lease_share, above=0, most=0.5)

"""Compute what a frame shows: all gateways, the replicas, each workload. None stands for unknown. Pure.

The acceptance rate is accepted / verified draft tokens; tokens a round are 1 + accepted / rounds; the
speed-up is the estimated plain-decoding time over the real time of the same tokens, both as the gateways
count them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from galley.common.metrics import catalogue
from galley.common.metrics.labels import BLOCKS, DRAFT, GATEWAY, POOL, REPLICA, SERVER_FAULT, TARGET, WORKLOAD
from galley.common.metrics.metric import Metric
from galley.common.sockets import host_and_port
from galley.core.routing.choice import DraftLease, TargetLease
from galley.top.fleet import POOLS, Fleet, Reading, Registered
from galley.top.series import COUNT, Samples, added, by, mean, quantile, ratio, rows_of, total
from galley.top.versions import Audits, DraftVersion, audits_of, versions_of

Lease: TypeAlias = TargetLease | DraftLease

_MEDIAN, _HIGH = 0.5, 0.99
_BREAKERS = {0: "closed", 1: "half open", 2: "open"}
CLOSED = "closed"
UP, AWAY, DRAINING, LEASED = "up", "away", "draining", "leased"


@dataclass(frozen=True, slots=True)
class Times:
    """Median and 99th percentile of a histogram over the last minute, in seconds."""

    median_s: float | None = None
    high_s: float | None = None


@dataclass(frozen=True, slots=True)
class Count:
    """A count since the services started, and within the last minute."""

    total: float = 0.0
    lately: float = 0.0


@dataclass(frozen=True, slots=True)
class Breaker:
    """The worst state of a replica's circuit breaker over all gateways."""

    pool: str
    replica: str
    state: str


@dataclass(frozen=True, slots=True)
class Speculation:
    acceptance: float | None = None
    tokens_per_round: float | None = None
    speed_up: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload over all gateways; `k` is the mean of the k requested in the last minute."""

    name: str
    tokens_per_s: float | None
    k: float | None
    speculation: Speculation


@dataclass(frozen=True, slots=True)
class Overview:
    """All gateways together; `failed` counts calls that ended with a server error."""

    sessions: float | None
    tokens_per_s: float | None
    rounds_per_s: float | None
    speculation: Speculation
    first_token: Times
    per_token: Times
    commit: Times
    refused: Count
    failovers: Count
    failed: Count
    breakers: tuple[Breaker, ...]


def overview_of(readings: Iterable[Reading]) -> Overview:
    gateways = of_pool(readings, GATEWAY)
    now, window = added(one.now for one in gateways), added(one.window.samples for one in gateways)
    return Overview(
        sessions=total(now, catalogue.SESSIONS_OPEN),
        tokens_per_s=rate(gateways, catalogue.CONFIRMED_TOKENS),
        rounds_per_s=rate(gateways, catalogue.ROUNDS),
        speculation=_speculation(window),
        first_token=times(window, catalogue.TIME_TO_FIRST_TOKEN.prometheus),
        per_token=times(window, catalogue.TIME_PER_OUTPUT_TOKEN.prometheus),
        commit=times(window, catalogue.COMMIT_DURATION.prometheus),
        refused=_count(now, window, catalogue.ADMISSION_REJECTED),
        failovers=_count(now, window, catalogue.FAILOVERS),
        failed=_count(now, window, catalogue.STREAMS, fault=SERVER_FAULT),
        breakers=breakers_of(gateways),
    )


def workloads_of(readings: Iterable[Reading]) -> list[Workload]:
    """Return the workloads, the busiest first."""
    gateways = of_pool(readings, GATEWAY)
    window = added(one.window.samples for one in gateways)
    known = {
        name for one in gateways for name in by(one.now, catalogue.CONFIRMED_TOKENS, WORKLOAD.prometheus)
    }
    found = [
        Workload(
            name,
            rate(gateways, catalogue.CONFIRMED_TOKENS, workload=name),
            mean(window, catalogue.K.prometheus, workload=name),
            _speculation(window, workload=name),
        )
        for name in known
    ]
    return sorted(found, key=lambda workload: (-(workload.tokens_per_s or 0.0), workload.name))


def of_pool(readings: Iterable[Reading], pool: str) -> list[Reading]:
    return [one for one in readings if one.pool == pool]


def times(grown: Samples, histogram: str) -> Times:
    return Times(quantile(grown, histogram, _MEDIAN), quantile(grown, histogram, _HIGH))


def rate(readings: Iterable[Reading], metric: Metric | str, **labels: str) -> float | None:
    """Return the increase per second, summed over the readings; None if no reading has it."""
    each = [ratio(total(one.recent.samples, metric, **labels), one.recent.seconds) for one in readings]
    known = [value for value in each if value is not None]
    return sum(known) if known else None


def breakers_of(gateways: Sequence[Reading]) -> tuple[Breaker, ...]:
    worst: dict[tuple[str, str], float] = {}
    for one in gateways:
        for pairs, value in rows_of(one.now, catalogue.BREAKER_STATE).items():
            labels = dict(pairs)
            key = (labels.get(POOL.prometheus, ""), labels.get(REPLICA.prometheus, ""))
            worst[key] = max(value, worst.get(key, 0.0))
    return tuple(
        Breaker(pool, replica, _BREAKERS.get(round(value), "?"))
        for (pool, replica), value in sorted(worst.items())
    )


def _speculation(window: Samples, **labels: str) -> Speculation:
    def grown(metric: Metric) -> float | None:
        return total(window, metric, **labels)

    rounds, accepted = grown(catalogue.ROUNDS), grown(catalogue.ACCEPTED_TOKENS)
    a_round = ratio(accepted or 0.0, rounds)
    return Speculation(
        acceptance=ratio(accepted, grown(catalogue.VERIFIED_TOKENS)),
        tokens_per_round=None if a_round is None else 1 + a_round,
        speed_up=ratio(grown(catalogue.PLAIN_TIME), grown(catalogue.DECODE_TIME)),
    )


def _count(now: Samples, window: Samples, metric: Metric, **labels: str) -> Count:
    return Count(total(now, metric, **labels) or 0.0, total(window, metric, **labels) or 0.0)


@dataclass(frozen=True, slots=True)
class Kv:
    """Blocks of a target's KV pool; `cached` hold prefixes that no session uses. None: counted as free."""

    used: float
    cached: float | None
    free: float

    @property
    def all(self) -> float:
        return self.used + (self.cached or 0.0) + self.free


@dataclass(frozen=True, slots=True)
class Replica:
    """One process. `sessions` (a gateway: open ones) and `rows` are means per step in the last minute.

    `oldest_s` is the 99th percentile of queue age, `preempted` counts since the start. `state`: up, away
    (`problem` says why), draining, or leased: known by its lease only.
    """

    pool: str
    name: str
    address: str
    state: str
    problem: str = ""
    away_s: float = 0.0
    sessions: float | None = None
    queue: float | None = None
    oldest_s: float | None = None
    rows: float | None = None
    batches_per_s: float | None = None
    preempted: float | None = None
    kv: Kv | None = None
    breaker: str = ""


def replicas_of(readings: Sequence[Reading], registered: Registered) -> list[Replica]:
    """Return the rows by pool: scraped services in their order, then replicas that only have a lease."""
    leases: dict[str, dict[str, Lease]] = {
        TARGET: {lease.address: lease for lease in registered.targets},
        DRAFT: {lease.address: lease for lease in registered.drafts},
    }
    rows: list[Replica] = []
    for one in readings:
        lease = _lease_of(one, readings, leases.get(one.pool, {}))
        rows.append(_scraped(one, lease))
    scraped = {row.address for row in rows}
    for pool, of_pool_ in leases.items():
        rows += [_leased(pool, lease) for lease in of_pool_.values() if lease.address not in scraped]
    breakers = {(one.pool, one.replica): one.state for one in breakers_of(of_pool(readings, GATEWAY))}
    rows = [replace(row, breaker=breakers.get((row.pool, row.address), "")) for row in rows]
    order = {pool: at for at, pool in enumerate(POOLS)}
    return sorted(rows, key=lambda row: order.get(row.pool, len(order)))


def _lease_of(one: Reading, readings: Sequence[Reading], leases: dict[str, Lease]) -> Lease | None:
    """Return a service's lease: by its address, else the only lease on a host with one service."""
    if one.service.address:
        return leases.get(one.service.address)
    host = _host(one.service.metrics)
    here = [lease for lease in leases.values() if _host(lease.address) == host]
    scraped = [other for other in of_pool(readings, one.pool) if _host(other.service.metrics) == host]
    return here[0] if len(here) == len(scraped) == 1 else None


def _host(address: str) -> str:
    try:
        return host_and_port(address)[0]
    except ValueError:
        return address


def _scraped(one: Reading, lease: Lease | None) -> Replica:
    row = Replica(
        one.pool,
        one.service.name,
        one.service.address or (lease.address if lease else ""),
        _state(one, lease),
        one.away,
        one.away_s if one.away else 0.0,
    )
    if one.pool == GATEWAY:
        return replace(row, sessions=total(one.now, catalogue.SESSIONS_OPEN))
    if one.pool == DRAFT:
        return replace(
            row,
            sessions=mean(one.window.samples, catalogue.DRAFT_BATCH_SESSIONS.prometheus),
            queue=total(one.now, catalogue.DRAFT_QUEUE_DEPTH),
            oldest_s=quantile(one.window.samples, catalogue.DRAFT_QUEUE_AGE.prometheus, _HIGH),
            batches_per_s=rate([one], catalogue.DRAFT_STEP_DURATION.prometheus + COUNT),
        )
    if one.pool == TARGET:
        return replace(
            row,
            sessions=mean(one.window.samples, catalogue.BATCH_SESSIONS.prometheus),
            queue=total(one.now, catalogue.QUEUE_DEPTH),
            oldest_s=quantile(one.window.samples, catalogue.QUEUE_AGE.prometheus, _HIGH),
            rows=mean(one.window.samples, catalogue.BATCH_ROWS.prometheus),
            batches_per_s=rate([one], catalogue.BATCH_DURATION.prometheus + COUNT),
            preempted=total(one.now, catalogue.PREEMPTIONS),
            kv=_kv(one),
        )
    return row


def _state(one: Reading, lease: Lease | None) -> str:
    if one.away:
        return AWAY
    return DRAINING if lease is not None and lease.draining else UP


def _kv(one: Reading) -> Kv | None:
    used, cached, free = (total(one.now, catalogue.KV_BLOCKS, state=state) for state in BLOCKS.values)
    if used is None or free is None:
        return None
    return Kv(max(0.0, used), None if cached is None else max(0.0, cached), max(0.0, free))


def _leased(pool: str, lease: Lease) -> Replica:
    row = Replica(
        pool, lease.address, lease.address, DRAINING if lease.draining else LEASED, queue=lease.queue_depth
    )
    if not isinstance(lease, TargetLease):
        return replace(row, sessions=lease.sessions)
    if lease.kv_blocks_total < 1:
        return row
    return replace(row, kv=Kv(lease.kv_blocks_total - lease.kv_blocks_free, None, lease.kv_blocks_free))


@dataclass(frozen=True, slots=True)
class Screen:
    """The content of one frame; `history` holds tokens per second of this frame and earlier ones."""

    overview: Overview
    replicas: list[Replica]
    workloads: list[Workload]
    versions: list[DraftVersion]
    audits: Audits | None
    history: tuple[float, ...]
    problem: str

    @property
    def has_live_process(self) -> bool:
        return any(row.state != AWAY for row in self.replicas)


def next_screen(fleet: Fleet, now_s: float) -> Screen:
    """Return the frame of this moment and add its tokens per second to `fleet.speeds`."""
    readings = fleet.readings(now_s)
    overview = overview_of(readings)
    speed = overview.tokens_per_s or 0.0
    fleet.speeds.append(speed if math.isfinite(speed) else 0.0)
    return Screen(
        overview,
        replicas_of(readings, fleet.registered),
        workloads_of(readings),
        versions_of(readings, fleet.registered),
        audits_of(readings),
        tuple(fleet.speeds),
        fleet.registered.problem,
    )

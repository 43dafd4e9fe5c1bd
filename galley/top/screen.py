"""Build each frame and its rows of replicas from the fleet. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from galley.client.addresses import host_and_port
from galley.common.metrics import catalogue
from galley.common.metrics.labels import BLOCKS, DRAFT, GATEWAY, TARGET
from galley.core.routing.choice import DraftLease, TargetLease
from galley.top.fleet import POOLS, Fleet, Reading, Registered
from galley.top.frame import Overview, Workload, breakers_of, of_pool, overview_of, rate, workloads_of
from galley.top.series import COUNT, mean, quantile, total

Lease: TypeAlias = TargetLease | DraftLease

_HIGH = 0.99
UP, AWAY, DRAINING, LEASED = "up", "away", "draining", "leased"


@dataclass(frozen=True, slots=True)
class Kv:
    """Blocks of a target's KV pool; `cached` hold prefixes that no session uses. None: not distinguished."""

    used: float
    cached: float | None
    free: float

    @property
    def all(self) -> float:
        return self.used + (self.cached or 0.0) + self.free


@dataclass(frozen=True, slots=True)
class Replica:
    """One process. `sessions` and `rows` are means over its batches, or a gateway's open sessions.

    `state`: up, away (`problem` says why), draining, or leased: known by its lease only.
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
    history: tuple[float, ...]
    problem: str

    @property
    def has_live_process(self) -> bool:
        return any(row.state != AWAY for row in self.replicas)


def next_screen(fleet: Fleet, now_s: float) -> Screen:
    """Return the frame of this moment and add its speed to the fleet's."""
    readings = fleet.readings(now_s)
    overview = overview_of(readings)
    speed = overview.tokens_per_s or 0.0
    fleet.speeds.append(speed if math.isfinite(speed) else 0.0)
    return Screen(
        overview,
        replicas_of(readings, fleet.registered),
        workloads_of(readings),
        tuple(fleet.speeds),
        fleet.registered.problem,
    )

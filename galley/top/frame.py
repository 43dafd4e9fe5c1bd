"""Compute what the dashboard shows of all gateways and of each workload. None stands for unknown. Pure.

The acceptance rate is accepted / verified draft tokens; tokens a round are 1 + accepted / rounds; the
speed-up is the estimated plain-decoding time over the real time of the same tokens, both as the gateways
count them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY, POOL, REPLICA, SERVER_FAULT, WORKLOAD
from galley.common.metrics.metric import Metric
from galley.top.fleet import Reading
from galley.top.series import Samples, added, by, mean, quantile, ratio, rows_of, total

_MEDIAN, _HIGH = 0.5, 0.99
_BREAKERS = {0: "closed", 1: "half open", 2: "open"}
CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Times:
    """Median and 99th percentile of a histogram of seconds."""

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
    """One workload over all gateways; `k` is the mean of the chosen k."""

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
    found = [_workload(name, gateways, window) for name in known]
    return sorted(found, key=lambda workload: (-(workload.tokens_per_s or 0.0), workload.name))


def of_pool(readings: Iterable[Reading], pool: str) -> list[Reading]:
    return [one for one in readings if one.pool == pool]


def times(grown: Samples, histogram: str) -> Times:
    return Times(quantile(grown, histogram, _MEDIAN), quantile(grown, histogram, _HIGH))


def rate(readings: Iterable[Reading], metric: Metric | str, **labels: str) -> float | None:
    """Return the increase per second over all readings; None if no reading has it."""
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


def _workload(name: str, gateways: Sequence[Reading], window: Samples) -> Workload:
    return Workload(
        name,
        rate(gateways, catalogue.CONFIRMED_TOKENS, workload=name),
        mean(window, catalogue.K.prometheus, workload=name),
        _speculation(window, workload=name),
    )


def _count(now: Samples, window: Samples, metric: Metric, **labels: str) -> Count:
    return Count(total(now, metric, **labels) or 0.0, total(window, metric, **labels) or 0.0)

"""Keep what the scrapes of each service showed over the last minute. Pure: times are arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from galley.common.metrics import catalogue
from galley.common.metrics.labels import DRAFT, GATEWAY, SERVICE, TARGET
from galley.core.routing.choice import DraftLease, TargetLease
from galley.core.versions.split import Split
from galley.stack.endpoint import Service
from galley.top.series import Samples, added, by, growth, rows_of, total

# Rates cover the last RATE_S seconds; ratios and quantiles need more events and cover WINDOW_S.
RATE_S = 10.0
WINDOW_S = 60.0
_MAX_SPEEDS = 60
_KEPT_STARTS = 16
SEVERAL = "several processes answer here; name each"
"""Why a service is not shown: its address is a load balancer's."""

POOLS = (GATEWAY, TARGET, DRAFT)
# The metric that identifies the pool of a service which does not name it.
_POOL_BY_METRIC = {
    catalogue.SESSIONS_OPEN: GATEWAY,
    catalogue.KV_BLOCKS: TARGET,
    catalogue.DRAFT_QUEUE_DEPTH: DRAFT,
}


@dataclass(frozen=True, slots=True)
class Increase:
    samples: Samples
    seconds: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One service at one moment. `away` says why it has not responded for `away_s`; `now` is empty then."""

    service: Service
    pool: str
    now: Samples
    recent: Increase
    window: Increase
    away: str
    away_s: float


@dataclass(frozen=True, slots=True)
class Registered:
    """The leases in the registry, and the split of the drafts' versions; None without a registry.

    `problem` says why they, or the split alone, could not be read.
    """

    targets: Sequence[TargetLease] = ()
    drafts: Sequence[DraftLease] = ()
    split: Split | None = None
    problem: str = ""


@dataclass(slots=True)
class _History:
    service: Service
    pool: str
    since_s: float
    last: Samples | None = None
    last_s: float = 0.0
    away: str = "not scraped yet"
    steps: deque[tuple[float, Increase]] = field(default_factory=deque)
    # When the processes began that answered, the last one at the end.
    starts: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STARTS))
    is_shared: bool = False

    def add(self, at_s: float, samples: Samples) -> None:
        if self._answers_for_several(total(samples, catalogue.PROCESS_START)):
            self.steps.clear()
            self.fail(at_s, SEVERAL)
            return
        if self.last is not None and at_s > self.last_s:
            self.steps.append((at_s, Increase(growth(self.last, samples), at_s - self.last_s)))
        while self.steps and self.steps[0][0] <= at_s - WINDOW_S:
            self.steps.popleft()
        self.pool = _pool_of(samples) or self.pool
        self.last, self.last_s, self.away = samples, at_s, ""

    def _answers_for_several(self, started: float | None) -> bool:
        """Return True once a process answered again after another: a restart does not bring one back."""
        if started is not None and (not self.starts or started != self.starts[-1]):
            self.is_shared = self.is_shared or started in self.starts
            self.starts.append(started)
        return self.is_shared

    def fail(self, at_s: float, why: str) -> None:
        if not self.away:
            self.since_s = at_s
        self.away = why

    def increase(self, now_s: float, span_s: float) -> Increase:
        within = [step for end_s, step in self.steps if end_s > now_s - span_s]
        return Increase(added(step.samples for step in within), sum(step.seconds for step in within))

    def reading(self, now_s: float) -> Reading:
        return Reading(
            self.service,
            self.pool,
            self.last if self.last is not None and not self.away else {},
            self.increase(now_s, RATE_S),
            self.increase(now_s, WINDOW_S),
            self.away,
            now_s - self.since_s,
        )


class Fleet:
    """All services and their scrapes; all times are seconds of one clock."""

    def __init__(self, services: Sequence[Service], now_s: float) -> None:
        self._histories = {one.metrics: _History(one, _pool_named(one.name), now_s) for one in services}
        self.registered = Registered()
        # Tokens per second in the latest frames.
        self.speeds: deque[float] = deque(maxlen=_MAX_SPEEDS)

    def add(self, service: Service, at_s: float, samples: Samples) -> None:
        self._histories[service.metrics].add(at_s, samples)

    def fail(self, service: Service, at_s: float, why: str) -> None:
        self._histories[service.metrics].fail(at_s, why)

    def readings(self, now_s: float) -> list[Reading]:
        return [one.reading(now_s) for one in self._histories.values()]


def _pool_of(samples: Samples) -> str:
    services = by(samples, catalogue.BUILD, SERVICE.prometheus)
    by_metric = (pool for metric, pool in _POOL_BY_METRIC.items() if rows_of(samples, metric))
    return next((pool for pool in services if pool in POOLS), next(by_metric, ""))


def _pool_named(name: str) -> str:
    """Return the pool by a part's name in a local stack, such as target-2."""
    return next((pool for pool in POOLS if name == pool or name.startswith(f"{pool}-")), "")

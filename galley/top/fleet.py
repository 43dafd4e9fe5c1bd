"""Keep what the scrapes of each service showed over the last minute. Pure: times are arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from galley.core.routing.choice import DraftLease, TargetLease
from galley.top import names
from galley.top.series import Samples, added, growth
from galley.top.service import Service

# Rates cover the last RATE_S seconds; ratios and quantiles need more events and cover WINDOW_S.
RATE_S = 10.0
WINDOW_S = 60.0

GATEWAY, TARGET, DRAFT = "gateway", "target", "draft"
POOLS = (GATEWAY, TARGET, DRAFT)
# The metric that identifies the pool of a service which does not name it.
_POOL_BY_METRIC = {names.SESSIONS: GATEWAY, names.KV_BLOCKS: TARGET, names.DRAFT_DEPTH: DRAFT}


@dataclass(frozen=True, slots=True)
class Increase:
    """The increase of one service's counters within `seconds`."""

    samples: Samples
    seconds: float


NOTHING = Increase({}, 0.0)


@dataclass(frozen=True, slots=True)
class Reading:
    """One service at one moment.

    `away` is the reason why it does not answer, empty while it does; `now` is empty while it is away.
    `answered` is True once it has answered; `recent` and `window` are empty before its second answer.
    """

    service: Service
    pool: str
    now: Samples
    recent: Increase
    window: Increase
    away: str
    away_s: float
    answered: bool


@dataclass(frozen=True, slots=True)
class Registered:
    """The leases in the registry; `problem` says why they could not be read."""

    targets: Sequence[TargetLease] = ()
    drafts: Sequence[DraftLease] = ()
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

    def add(self, at_s: float, samples: Samples) -> None:
        if self.last is not None and at_s > self.last_s:
            self.steps.append((at_s, Increase(growth(self.last, samples), at_s - self.last_s)))
        while self.steps and self.steps[0][0] <= at_s - WINDOW_S:
            self.steps.popleft()
        self.pool = _pool_of(samples) or self.pool
        self.last, self.last_s, self.away = samples, at_s, ""

    def fail(self, at_s: float, why: str) -> None:
        if not self.away:
            self.since_s = at_s
        self.away = why

    def increase(self, now_s: float, span_s: float) -> Increase:
        """Sum the increases between scrapes that ended within the span."""
        within = [step for end_s, step in self.steps if end_s > now_s - span_s]
        if not within:
            return NOTHING
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
            self.last is not None,
        )


class Fleet:
    """All services and their scrapes; all times are seconds of one clock."""

    def __init__(self, services: Sequence[Service], now_s: float) -> None:
        self._histories = {one.metrics: _History(one, _pool_named(one.name), now_s) for one in services}
        self.registered = Registered()

    @property
    def services(self) -> tuple[Service, ...]:
        """Return the services in the order in which they were named."""
        return tuple(one.service for one in self._histories.values())

    def add(self, service: Service, at_s: float, samples: Samples) -> None:
        """Record a successful scrape."""
        self._histories[service.metrics].add(at_s, samples)

    def fail(self, service: Service, at_s: float, why: str) -> None:
        """Record a failed scrape."""
        self._histories[service.metrics].fail(at_s, why)

    def readings(self, now_s: float) -> list[Reading]:
        """Return a reading of every service."""
        return [one.reading(now_s) for one in self._histories.values()]


def _pool_of(samples: Samples) -> str:
    for labels in samples.get(names.BUILD, {}):
        pool = dict(labels).get(names.SERVICE, "")
        if pool in POOLS:
            return pool
    return next((pool for name, pool in _POOL_BY_METRIC.items() if name in samples), "")


def _pool_named(name: str) -> str:
    """Return the pool by a part's name in a local stack, such as target-2."""
    return next((pool for pool in POOLS if name == pool or name.startswith(f"{pool}-")), "")

"""What was heard of each service over the last minute, from scrape to scrape. Pure: times are arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from galley.core.routing.choice import DraftLease, TargetLease
from galley.top import names
from galley.top.series import Samples, added, growth
from galley.top.service import Service

# Speeds are of the last RATE_S seconds; ratios and quantiles, which need many events, of the last WINDOW_S.
RATE_S = 10.0
WINDOW_S = 60.0

GATEWAY, TARGET, DRAFT = "gateway", "target", "draft"
POOLS = (GATEWAY, TARGET, DRAFT)
# By which metric a service is known that does not say what it is.
_TELLING = {names.SESSIONS: GATEWAY, names.KV_BLOCKS: TARGET, names.DRAFT_DEPTH: DRAFT}


@dataclass(frozen=True, slots=True)
class Grown:
    """By how much the counters of one service grew within `seconds`."""

    samples: Samples
    seconds: float


NOTHING = Grown({}, 0.0)


@dataclass(frozen=True, slots=True)
class Reading:
    """One service at one moment. `now` is empty while it is `away` (why, empty where it is there).

    `heard`: it has answered at least once; `recent` and `window` are empty before it has twice.
    """

    service: Service
    pool: str
    now: Samples
    recent: Grown
    window: Grown
    away: str
    away_s: float
    heard: bool


@dataclass(frozen=True, slots=True)
class Registered:
    """What the registry says; `problem` where it could not be asked."""

    targets: Sequence[TargetLease] = ()
    drafts: Sequence[DraftLease] = ()
    problem: str = ""


@dataclass(slots=True)
class _Watched:
    service: Service
    pool: str
    since_s: float
    last: Samples | None = None
    last_s: float = 0.0
    away: str = "not asked yet"
    steps: deque[tuple[float, Grown]] = field(default_factory=deque)

    def heard(self, at_s: float, samples: Samples) -> None:
        if self.last is not None and at_s > self.last_s:
            self.steps.append((at_s, Grown(growth(self.last, samples), at_s - self.last_s)))
        while self.steps and self.steps[0][0] <= at_s - WINDOW_S:
            self.steps.popleft()
        self.pool = _pool_of(samples) or self.pool
        self.last, self.last_s, self.away = samples, at_s, ""

    def missed(self, at_s: float, why: str) -> None:
        if not self.away:
            self.since_s = at_s
        self.away = why

    def grown(self, now_s: float, span_s: float) -> Grown:
        """Over the steps that ended within the span."""
        within = [step for end_s, step in self.steps if end_s > now_s - span_s]
        if not within:
            return NOTHING
        return Grown(added(step.samples for step in within), sum(step.seconds for step in within))

    def reading(self, now_s: float) -> Reading:
        return Reading(
            self.service,
            self.pool,
            self.last if self.last is not None and not self.away else {},
            self.grown(now_s, RATE_S),
            self.grown(now_s, WINDOW_S),
            self.away,
            now_s - self.since_s,
            self.last is not None,
        )


class Fleet:
    """Told of scrapes as they come; all times are of one clock, in seconds."""

    def __init__(self, services: Sequence[Service], now_s: float) -> None:
        self._watched = {one.metrics: _Watched(one, _pool_named(one.name), now_s) for one in services}
        self.registered = Registered()

    @property
    def services(self) -> tuple[Service, ...]:
        """In the order in which they were named."""
        return tuple(one.service for one in self._watched.values())

    def heard(self, service: Service, at_s: float, samples: Samples) -> None:
        """It said this."""
        self._watched[service.metrics].heard(at_s, samples)

    def missed(self, service: Service, at_s: float, why: str) -> None:
        """It could not be asked, or its answer not be read."""
        self._watched[service.metrics].missed(at_s, why)

    def readings(self, now_s: float) -> list[Reading]:
        """Of all services."""
        return [one.reading(now_s) for one in self._watched.values()]


def _pool_of(samples: Samples) -> str:
    for labels in samples.get(names.BUILD, {}):
        said = dict(labels).get(names.SERVICE, "")
        if said in POOLS:
            return said
    return next((pool for name, pool in _TELLING.items() if name in samples), "")


def _pool_named(name: str) -> str:
    """As the local stack names its parts: target, target-2 ..."""
    return next((pool for pool in POOLS if name == pool or name.startswith(f"{pool}-")), "")

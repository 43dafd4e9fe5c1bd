"""Disturbances of processes, links, the store's file and its clock, in an order that a seed determines.

An event is one disturbance, or two at once. Every pool's kills are spread evenly over a run, because the
restart of a target takes longer than most events. Cuts are short, or longer than every give-up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from random import Random
from typing import TypeVar

from galley.common.registry.leases import DEFAULT_LEASE_S
from services.gateway.replicas.membership import LEASE_GRACE_S
from tests.chaos.links import CLIENT, LINKS, PARTS, STORE, Ends

KILL, TERM, STOP = "SIGKILL", "SIGTERM", "SIGSTOP"
DELAY, LOSS, RESET = "DELAY", "LOSS", "RESET"
CUT, CUT_REQUESTS, CUT_RESPONSES = "CUT", "CUT_REQUESTS", "CUT_RESPONSES"
DROP_REQUESTS, DROP_RESPONSES = "DROP_REQUESTS", "DROP_RESPONSES"
"""One-way cuts by the system's packet filter where a run may use it, else as CUT_REQUESTS, CUT_RESPONSES."""
TRUNCATE, FLIP = "TRUNCATE", "FLIP"
"""The store is killed, and restarts with the end of its append-only file cut off, or with a bit inverted."""
CLOCK = "CLOCK"
ONLY_REQUESTS = frozenset({CUT_REQUESTS, DROP_REQUESTS})
ONLY_RESPONSES = frozenset({CUT_RESPONSES, DROP_RESPONSES})
CUTS = frozenset({CUT}) | ONLY_REQUESTS | ONLY_RESPONSES
DAMAGES = frozenset({TRUNCATE, FLIP})
POOLS = ("gateway", "target", "draft", STORE)

CLIENT_PATIENCE_S = 2.0
GIVE_UPS = {"--store-timeout-s": 2.0, "--target-timeout-s": 3.0, "--client-timeout-s": 5.0}
"""Timeouts of the gateways. They are shorter than by default, so that a long cut is bearable."""
LONGEST_GIVE_UP_S = max(
    2 * GIVE_UPS["--store-timeout-s"] + CLIENT_PATIENCE_S, DEFAULT_LEASE_S + LEASE_GRACE_S, *GIVE_UPS.values()
)
"""The time after which even a client has given up that was waiting for two gateways, one after the other."""
_KEEPALIVE_S = 15.0
"""The time that a ping of gRPC may be unanswered (`galley.common.tls.channels`)."""

_EVENTS = {(KILL,): 120, (KILL, CUT): 202, (KILL, KILL): 190, (CUT,): 60, (CUT, CUT): 20, (): 75}
"""Shares of the events; () is any other disturbance."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is done to a stack whose targets have one engine: `events` events by default.

    `killed` has the shares of the pools among kills. A whole run has at least `kills` kills, `target_kills`
    of them of targets, and `cuts` cut links. A stream counts as lost after `patience_s` without a token.
    """

    events: int
    killed: Mapping[str, int]
    kills: int
    target_kills: int
    cuts: int
    patience_s: float


PLANS = {
    "paged": Plan(
        sum(_EVENTS.values()), {"gateway": 6, "draft": 6, STORE: 7, "target": 1}, 700, 1, 300, 120.0
    ),
    # A target takes half a minute to start with vLLM, and longer if both were killed.
    "vllm": Plan(60, {"gateway": 5, "draft": 4, STORE: 4, "target": 3}, 50, 10, 20, 300.0),
}
"""The plan by the engine of the targets, whose restart is slowest."""


_STOPPED_S = (0.2, 3.0)
_LINK_S = (0.5, 2.0)
_SHORT_S = (0.2, 2.0)
_LONG = (1.1, 1.3)
"""Length of a long cut, in longest give-ups."""
_LONG_SHARE = 0.15
_DELAY_S = (0.02, 0.2)
_LOSS = (0.01, 0.2)
_CLOCK_LASTS_S = (3.0, 5.0)
_CLOCK_S = (-4000.0, -60.0, -2.0, 2.0, 60.0, 4000.0)

Where = tuple[str, ...]
"""A part, or the two ends of a link."""
Event = tuple["Disturbance", ...]
K = TypeVar("K", bound=Hashable)


def pool_of(part: str) -> str:
    """Return the pool of a part: its name without the number."""
    return part.removesuffix("-2")


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A disturbance of `where` for `lasts_s` seconds.

    `amount` is the delay or the step of the clock in seconds, the lost share, or where a file is damaged:
    its share of the last part of the file.
    """

    where: Where
    what: str
    lasts_s: float = 0.0
    amount: float = 0.0

    @property
    def kind(self) -> str:
        """Return the kind, which is the same for all processes of a pool."""
        return f"{'->'.join(pool_of(part) for part in self.where)} {self.what}"

    @property
    def pools(self) -> frozenset[str]:
        """Return the pools that must be complete before it, so that another part can stand in."""
        return frozenset(pool_of(part) for part in self.where if part != CLIENT)

    @property
    def is_long(self) -> bool:
        """Return True for a cut that is longer than every give-up."""
        return self.what in CUTS and self.lasts_s > _give_up_s(self.where)


def _give_up_s(where: Where) -> float:
    return LONGEST_GIVE_UP_S if STORE in where else _KEEPALIVE_S


def killed(part: str) -> Disturbance:
    return Disturbance((part,), KILL)


def kind_of(event: Event) -> str:
    """Return the kind of an event; of two disturbances only what they are, not where."""
    if len(event) == 1:
        return event[0].kind
    return " + ".join(sorted("CUT" if one.what in CUTS else one.what for one in event))


def has_own_relay(ends: Ends) -> bool:
    """Return True if no other link uses the relay of this one."""
    return CLIENT in ends or STORE in ends


_Kind = tuple[Where, str]

_OF_CUTS: list[_Kind] = [
    *((ends, what) for ends in LINKS for what in (CUT, CUT_REQUESTS, CUT_RESPONSES)),
    *((ends, what) for ends in LINKS if has_own_relay(ends) for what in (DROP_REQUESTS, DROP_RESPONSES)),
]
_OTHERS: list[_Kind] = [
    *(((part,), what) for part in PARTS for what in (TERM, STOP)),
    *((ends, what) for ends in LINKS for what in (DELAY, LOSS, RESET)),
    *[((STORE,), what) for what in (TRUNCATE, FLIP, CLOCK)] * 4,
]
ALL: frozenset[_Kind] = frozenset([*(((part,), KILL) for part in PARTS), *_OF_CUTS, *_OTHERS])


def events(count: int, seed: int, plan: Plan) -> list[Event]:
    """Return events, the same for the same seed; all kinds of cuts, and of others, occur equally often."""
    chance = Random(seed)
    planned = list(
        _spread(
            {kinds: ceil(count * share / sum(_EVENTS.values())) for kinds, share in _EVENTS.items()}, chance
        )
    )
    kills = _kills(sum(kinds.count(KILL) for kinds in planned) + len(PARTS), plan.killed, chance)
    cuts, others = _endless(_OF_CUTS, chance), _endless(_OTHERS, chance)
    made = []
    for kinds in planned:
        event: list[Disturbance] = [] if kinds else [_disturbance(*next(others), chance)]
        for what in kinds:
            event.append(_next_kill(kills, event) if what == KILL else _next_cut(cuts, event, chance))
        made.append(tuple(event))
    return made


def _spread(counts: Mapping[K, int], chance: Random) -> list[K]:
    """Return each key as often as given, evenly but not regularly spread."""
    places = [
        ((number + chance.random()) / count, key) for key, count in counts.items() for number in range(count)
    ]
    return [key for _, key in sorted(places, key=lambda place: place[0])]


def _kills(count: int, shares: Mapping[str, int], chance: Random) -> list[str]:
    counts = {pool: ceil(count * share / sum(shares.values())) for pool, share in shares.items()}
    pools = {pool: [part for part in PARTS if pool_of(part) == pool] for pool in POOLS}
    return [chance.choice(pools[pool]) for pool in _spread(counts, chance)]


def _next_kill(kills: list[str], beside: Sequence[Disturbance]) -> Disturbance:
    busy = {one.where for one in beside}
    return killed(kills.pop(next(at for at, part in enumerate(kills) if (part,) not in busy)))


def _next_cut(cuts: Iterator[_Kind], beside: Sequence[Disturbance], chance: Random) -> Disturbance:
    busy = {one.where for one in beside}
    where, what = next(kind for kind in cuts if kind[0] not in busy)
    return _disturbance(where, what, chance)


def _endless(kinds: Sequence[_Kind], chance: Random) -> Iterator[_Kind]:
    while True:
        yield from chance.sample(kinds, len(kinds))


def _disturbance(where: Where, what: str, chance: Random) -> Disturbance:
    match what:
        case "SIGSTOP":
            return Disturbance(where, what, chance.uniform(*_STOPPED_S))
        case "DELAY":
            return Disturbance(where, what, chance.uniform(*_LINK_S), chance.uniform(*_DELAY_S))
        case "LOSS":
            return Disturbance(where, what, chance.uniform(*_LINK_S), chance.uniform(*_LOSS))
        case "TRUNCATE" | "FLIP":
            return Disturbance(where, what, amount=chance.random())
        case "CLOCK":
            return Disturbance(where, what, chance.uniform(*_CLOCK_LASTS_S), chance.choice(_CLOCK_S))
        case _ if what in CUTS:
            long = chance.random() < _LONG_SHARE
            lasts_s = _give_up_s(where) * chance.uniform(*_LONG) if long else chance.uniform(*_SHORT_S)
            return Disturbance(where, what, lasts_s)
        case _:
            return Disturbance(where, what)


def count_of(measured: Iterable[Event], whats: Iterable[str]) -> int:
    """Return how many disturbances of the events are of these."""
    wanted = frozenset(whats)
    return sum(one.what in wanted for event in measured for one in event)

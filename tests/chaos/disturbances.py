"""Disturbances of processes and links, drawn in an order that a seed determines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from random import Random

from tests.chaos.links import CLIENT, LINKS, PARTS, STORE

KILL, TERM, STOP = "SIGKILL", "SIGTERM", "SIGSTOP"
DELAY, LOSS, PARTITION, RESET = "DELAY", "LOSS", "PARTITION", "RESET"
POOLS = ("gateway", "target", "draft", STORE)

_KILLS = 0.75
"""Share of kills among the disturbances: a run must have a minimum number of them (`goals.KILLS`)."""
_STOPPED_S = (0.2, 3.0)
_LINK_S = (0.5, 3.0)
_PARTITION_S = (0.2, 8.0)
"""Leases in the store expire after 3 s, and gateways drop their replicas 3 s later."""
_DELAY_S = (0.02, 0.2)
_LOSS = (0.01, 0.2)

Where = tuple[str, ...]
"""A part, or the two ends of a link."""


def pool_of(part: str) -> str:
    """Return the pool of a part: its name without the number."""
    return part.removesuffix("-2")


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A disturbance of `where` for `lasts_s` seconds; `amount` is the delay in seconds or the lost share."""

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


def killed(part: str) -> Disturbance:
    return Disturbance((part,), KILL)


_Kind = tuple[Where, str]

# Gateways, drafts and the store are killed equally often, targets half as often: their restart is slowest.
_OF_KILLS: list[_Kind] = [
    ((part,), KILL) for part in (*PARTS, *(part for part in PARTS if pool_of(part) != "target"), STORE, STORE)
]
_OTHERS: list[_Kind] = [
    *(((part,), what) for part in PARTS for what in (TERM, STOP)),
    *((ends, what) for ends in LINKS for what in (DELAY, LOSS, PARTITION, RESET)),
]


def disturbances(count: int, seed: int, *, kills_only: bool = False) -> list[Disturbance]:
    """Return disturbances, the same for the same seed; those other than kills occur equally often."""
    chance = Random(seed)
    kills = count if kills_only else ceil(_KILLS * count)
    drawn = _drawn(_OF_KILLS, kills, chance) + _drawn(_OTHERS, count - kills, chance)
    chance.shuffle(drawn)
    return [_disturbance(where, what, chance) for where, what in drawn]


def _drawn(kinds: Sequence[_Kind], count: int, chance: Random) -> list[_Kind]:
    drawn: list[_Kind] = []
    while len(drawn) < count:
        drawn += chance.sample(kinds, len(kinds))
    return drawn[:count]


def _disturbance(where: Where, what: str, chance: Random) -> Disturbance:
    match what:
        case "SIGSTOP":
            return Disturbance(where, what, chance.uniform(*_STOPPED_S))
        case "PARTITION":
            return Disturbance(where, what, chance.uniform(*_PARTITION_S))
        case "DELAY":
            return Disturbance(where, what, chance.uniform(*_LINK_S), chance.uniform(*_DELAY_S))
        case "LOSS":
            return Disturbance(where, what, chance.uniform(*_LINK_S), chance.uniform(*_LOSS))
        case _:
            return Disturbance(where, what)

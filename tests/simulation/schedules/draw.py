"""Draw faults: what they hit, and when, and for how long."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.simulation.schedule import Fault, Schedule
from tests.simulation.schedules.cuts import give_ups_s

_FAULTS_END_S = 2.5
"""All faults begin before this time."""
_AROUND = frozenset({"cut", "deaf", "freeze", "lossy", "stall"})
"""Faults whose length is often that of a time limit."""
_LONGEST_S = 10.0
"""Longest length that is drawn around limits of several parts; `cuts.py` draws longer ones."""
COPIES = ("copy-0", "copy-1")


def faults_of(schedule: Schedule, rng: random.Random, count: int) -> tuple[Fault, ...]:
    drawer = Drawer(rng, schedule)
    return tuple(sorted((drawer.fault() for _ in range(count)), key=_time_of))


def _time_of(fault: Fault) -> float:
    return fault.at_s


class Drawer:
    def __init__(self, rng: random.Random, schedule: Schedule) -> None:
        self._rng = rng
        gateways = [f"gateway-{i}" for i in range(schedule.gateways)]
        self._targets = [f"target-{i}" for i in range(len(schedule.builds))]
        drafts = [f"draft-{i}" for i in range(schedule.drafts)]
        clients = [planned.client for planned in schedule.sessions]
        replicas = self._targets + drafts
        nodes = [*gateways, *replicas, "redis"]
        self._give_ups = give_ups_s(schedule)
        self._killed = gateways + replicas + self._targets
        # (weight, kind, the groups that its subjects come from, its longest time in seconds, amounts)
        self._kinds: list[tuple[int, str, Sequence[Sequence[str]], float, Sequence[float]]] = [
            (6, "kill", (), 0.0, ()),
            (4, "redis-crash", (), 0.0, ()),
            (4, "cut", (gateways, [*replicas, "redis", "redis", *clients]), 6.0, ()),
            (3, "deaf", (gateways, [*replicas, "redis", "redis", *clients]), 6.0, ()),
            (3, "freeze", (nodes,), 3.0, ()),
            (2, "slow", ([*nodes, *clients],), 3.0, (3.0, 20.0, 100.0)),
            (2, "reset", (gateways, [*replicas, *clients]), 0.0, ()),
            (2, "jump", (gateways,), 20.0, ()),
            (3, "lossy", (), 2.0, (0.1, 0.4)),
            (2, "repeat", (), 3.0, (0.2, 1.0)),
            (1, "engine-fails", (self._targets,), 1.0, ()),
            (1, "draft-fails", (drafts or ["none"],), 2.0, ()),
            (2, "drain", (gateways + replicas,), 0.0, ()),
            (4, "stall", (clients,), 14.0, ()),
            (3, "elsewhere", (clients,), 0.0, ()),
            (1, "abort", (clients,), 0.0, ()),
            (2, "rival", (clients,), 0.0, ()),
            (1, "leave", (clients,), 0.0, ()),
            (2, "wrong-resume", (clients,), 0.0, (0, 10**6)),
            (2, "stranger", (clients,), 0.0, ()),
            (1, "damage", (clients, ("torn", "flipped")), 0.0, (0.0, 0.5, 0.9)),
            (
                2,
                "step",
                (["redis", "redis", *gateways, *self._targets],),
                0.0,
                (-60.0, -3.0, -0.5, 0.5, 3.0, 60.0),
            ),
        ]
        if schedule.replicas:
            self._kinds += [
                (4, "failover", (("redis",),), 3.0, (0, 0, 1)),
                (3, "cut", (("redis",), COPIES), 6.0, ()),
                (1, "deaf", (("redis",), COPIES), 6.0, ()),
            ]

    def fault(self) -> Fault:
        rng = self._rng
        [(_, kind, groups, longest_s, amounts)] = rng.choices(self._kinds, [kind[0] for kind in self._kinds])
        at_s = rng.uniform(0.0, _FAULTS_END_S)
        if kind == "kill":
            node = rng.choice(self._killed)
            return Fault(at_s, kind, (node,), self._span(1.5), amount=float(rng.random() < 0.2))
        if kind == "redis-crash":
            lost_s = rng.choice([0.0, 0.0, 0.02, 0.2, 1.0, 9.0])
            return Fault(at_s, kind, (), self._span(3.0), lost_s)
        where = tuple(rng.choice(group) for group in groups)
        if kind == "deaf" and rng.random() < 0.5:
            where = where[::-1]
        for_s = self._span(longest_s) if longest_s else 0.0
        if kind in _AROUND and rng.random() < 0.5:
            for_s = self._around()
        if kind == "jump":
            return Fault(at_s, kind, where, amount=for_s)
        if kind in {"lossy", "repeat"}:
            where = ("redis",)
        return Fault(at_s, kind, where, for_s, rng.choice(amounts) if amounts else 0.0)

    def partings(self) -> list[Fault]:
        """Return faults that freeze the targets in turn: sessions move away and come back to their caches."""
        return [
            Fault(
                1.0 + 4.0 * turn + self._rng.uniform(0.0, 0.4),
                "freeze",
                (self._targets[turn % 2],),
                self._rng.uniform(2.9, 3.5),
            )
            for turn in range(4)
        ]

    def _around(self) -> float:
        """Return a time just before or after some part gives up, or after two of them in turn."""
        rng = self._rng
        limits_s: float = sum(rng.choice(self._give_ups) for _ in range(rng.choice([1, 1, 2])))
        return min(_LONGEST_S, max(0.02, limits_s * rng.uniform(0.95, 1.1) + rng.uniform(-0.1, 0.2)))

    def _span(self, longest_s: float) -> float:
        return self._rng.choice([0.03, 0.3, 1.0]) * longest_s * self._rng.uniform(0.5, 1.0)

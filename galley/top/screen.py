"""From what was heard to what is shown now; it remembers the speeds that it has shown. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from galley.top.fleet import Fleet
from galley.top.frame import Overview, Workload, overview_of, workloads_of
from galley.top.replicas import AWAY, Replica, replicas_of

HISTORY = 60


@dataclass(frozen=True, slots=True)
class Screen:
    """All that one frame shows; `history` are the tokens per second of it and those before."""

    overview: Overview
    replicas: list[Replica]
    workloads: list[Workload]
    history: tuple[float, ...]
    problem: str

    @property
    def anybody(self) -> bool:
        """Whether any process is there, by its own word or the registry's."""
        return any(row.state != AWAY for row in self.replicas)


class Screens:
    """Of one fleet, frame by frame."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._history: deque[float] = deque(maxlen=HISTORY)

    def next(self, now_s: float) -> Screen:
        """The frame of this moment, which goes into the history."""
        readings = self._fleet.readings(now_s)
        registered = self._fleet.registered
        overview = overview_of(readings)
        speed = overview.tokens_per_s or 0.0
        self._history.append(speed if math.isfinite(speed) else 0.0)
        return Screen(
            overview,
            replicas_of(readings, registered),
            workloads_of(readings),
            tuple(self._history),
            registered.problem,
        )

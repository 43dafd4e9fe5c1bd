"""Build each frame from the fleet; remember the speeds of earlier frames. Pure."""

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
    """The content of one frame; `history` holds tokens per second of this frame and earlier ones."""

    overview: Overview
    replicas: list[Replica]
    workloads: list[Workload]
    history: tuple[float, ...]
    problem: str

    @property
    def has_live_process(self) -> bool:
        """Return True if any process is up or leased."""
        return any(row.state != AWAY for row in self.replicas)


class Screens:
    """The frames of one fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._history: deque[float] = deque(maxlen=HISTORY)

    def next(self, now_s: float) -> Screen:
        """Return the frame of this moment and add its speed to the history."""
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

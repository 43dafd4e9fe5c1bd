"""Build each frame from the fleet. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from galley.top.fleet import Fleet
from galley.top.frame import Overview, Workload, overview_of, workloads_of
from galley.top.replicas import AWAY, Replica, replicas_of


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

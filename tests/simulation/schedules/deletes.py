"""Draw which sessions their clients delete."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.schedule import Fault, PlannedSession, Schedule, Timing
from tests.simulation.schedules.sessions import without_limits

DELETES = "deletes"
"""The theme in which each session is deleted, often late. In a part of all other schedules one is."""

_SHARE = 0.1


def with_deletes(schedule: Schedule, *, always: bool = False) -> Schedule:
    """Have sessions deleted in a part of the schedules; a draw of its own leaves all else as it was."""
    rng = random.Random(f"deletes {schedule.seed}")
    if always:
        whole = replace(
            schedule, principals=without_limits(schedule.principals), timing=Timing(store_s=0.5), faults=()
        )
        return whole.with_faults(tuple(fault for it in whole.sessions for fault in _late(it, rng)))
    if rng.random() >= _SHARE:
        return schedule
    return schedule.with_faults((*schedule.faults, _delete(rng.choice(schedule.sessions), rng)))


def _delete(planned: PlannedSession, rng: random.Random) -> Fault:
    return Fault(planned.at_s + rng.choice([0.3, 3.0]) * rng.uniform(0.5, 1.5), "delete", (planned.client,))


def _late(planned: PlannedSession, rng: random.Random) -> tuple[Fault, ...]:
    """Return a deletion that may reach the store after its gateway has given up."""
    fault = _delete(planned, rng)
    cut_s = fault.at_s + rng.uniform(0.003, 0.015)
    return fault, Fault(cut_s, "deaf", ("gateway-0", "redis"), rng.choice([0.001, rng.uniform(1.1, 1.4)]))

"""Draw cuts that last longer than every give-up."""

from __future__ import annotations

import random
from dataclasses import astuple, replace

from tests.simulation.schedule import Fault, Schedule

CUTS = frozenset({"cut", "deaf"})
"""Faults that keep messages from their receivers."""
_LENGTHENED = CUTS | {"freeze", "stall"}
_SHARE = 0.3
"""Share of these faults whose length is drawn around the longest give-up."""
_LEAST, _MOST = 0.95, 1.3
"""Their shortest and longest length, in longest give-ups."""


def give_ups_s(schedule: Schedule) -> list[float]:
    """Return how long each part waits for another before it gives up, in seconds."""
    timing, patience_s = schedule.timing, {it.retries.patience_s for it in schedule.sessions}
    return [*astuple(timing), *sorted(patience_s), schedule.client_s, timing.renew_s]


def with_long_cuts(schedule: Schedule) -> Schedule:
    """Lengthen a part of the cuts; a draw of its own leaves all else of a seed as it was."""
    rng, longest_s = random.Random(f"long cuts {schedule.seed}"), max(give_ups_s(schedule))

    def lengthened(fault: Fault) -> Fault:
        if fault.kind not in _LENGTHENED or rng.random() >= _SHARE:
            return fault
        return replace(fault, for_s=longest_s * rng.uniform(_LEAST, _MOST))

    return schedule.with_faults(tuple(lengthened(fault) for fault in schedule.faults))

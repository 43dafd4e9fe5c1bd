"""Shrink a failing schedule to a small one that still fails: fewer faults, fewer sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tests.simulation.schedule import Schedule

T = TypeVar("T")


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """The smallest found: no single fault or session of it can go without the failure going too."""
    while True:
        smaller = _with_fewer_sessions(_with_fewer_faults(schedule, fails), fails)
        if smaller == schedule:
            return schedule
        schedule = smaller


def _with_fewer_faults(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    return schedule.with_faults(_fewest(schedule.faults, lambda kept: fails(schedule.with_faults(kept))))


def _with_fewer_sessions(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    return schedule.with_sessions(
        _fewest(schedule.sessions, lambda kept: bool(kept) and fails(schedule.with_sessions(kept)))
    )


def _fewest(items: tuple[T, ...], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Leave out halves, then quarters, ... of them, as long as it still fails (delta debugging)."""
    size = len(items)
    while size >= 1:
        start = 0
        while start < len(items):
            kept = items[:start] + items[start + size :]
            if fails(kept):
                items = kept
            else:
                start += size
        size //= 2
    return items

"""Measure what a step of an engine costs on this machine.

Steps are timed once at start; the scheduler decides by the curve. A step of R rows is timed as on a busy
replica: several sessions with some context, each with a verify chunk of a few rows.
"""

from __future__ import annotations

from collections.abc import Callable

from galley.core.cost.model import StepTimes

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 128
CHUNK_ROWS = 8
REPEATS = 3
# After _SOON_NS points are measured once, after _ENOUGH_NS not at all.
_SOON_NS = 2_000_000_000
_ENOUGH_NS = 6_000_000_000


def time_steps(prepare: Callable[[int], Callable[[], object] | None], clock: Callable[[], int]) -> StepTimes:
    """Return the times of steps of ROWS rows, the best of three each; blocks, for about two seconds in all.

    `prepare` returns what runs a step of so many rows; or None if that does not fit into the KV memory, but
    never for one row. On a slow machine later points are timed once or left out.
    """
    points: list[tuple[int, int]] = []
    start: int | None = None
    for rows in ROWS:
        step = prepare(rows)
        if step is None:
            break
        if start is None:
            step()  # the first step compiles and allocates
            start = clock()
        if clock() - start > _ENOUGH_NS:
            break
        points.append((rows, _best_ns(step, clock, start + _SOON_NS)))
    return StepTimes.measured(points)


def _best_ns(step: Callable[[], object], clock: Callable[[], int], until: int) -> int:
    best = 0
    for _ in range(REPEATS):
        since = clock()
        step()
        now = clock()
        took = max(1, now - since)
        best = min(best or took, took)
        if now > until:
            break
    return best

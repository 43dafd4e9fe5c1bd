"""How long streams waited for their next token, from the times at which tokens came. All in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median


def longest_wait(heard: Sequence[float], since: float, until: float) -> float:
    """The longest wait that began before `until` and ended after `since`, counted from `since` on.

    What was on its way when something broke comes at once, and the wait after it: so not the first counts.
    """
    times = [since, *(time for time in heard if time > since)]
    return max((after - before for before, after in pairwise(times) if before < until), default=0.0)


def longest_within(heard: Sequence[float], since: float, until: float, asked: Sequence[float] = ()) -> float:
    """The longest time between the two in which none came: the same for any span of that length.

    A wait in which an answer was `asked` for is none for a next token, and does not count.
    """
    times = [since, *(time for time in heard if since < time < until), until]
    return max(
        (
            after - before
            for before, after in pairwise(times)
            if not any(before <= time <= after for time in asked)
        ),
        default=0.0,
    )


def usual_wait(heard: Sequence[float], since: float, until: float) -> float | None:
    """The median time between two that came; None if fewer came."""
    times = [time for time in heard if since <= time <= until]
    return median(after - before for before, after in pairwise(times)) if len(times) > 1 else None

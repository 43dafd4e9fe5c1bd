"""Waiting for a hint: what is known of a session's drafts, and when a pass had better be put off for one.

Compared are two ways to the same point. *Linger*: wait until the hints that are due should be here, then one
pass with them. *Go on*: as many plain passes as fit into that time, and the hints, late, with what is then
left of them. The way that confirms more expected tokens per time is taken; all sessions of the pass pay for
the wait, so with many of them it seldom pays. Hints that are here are used either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from galley.core.cost.model import StepNs
from galley.core.scheduler.request import ActiveRequest

# Of one hint, that are looked at when the worth of waiting for it is weighed.
_MOST_ROWS = 16
# Of all of them, so many counts are looked at.
_TRIED_ROWS = 32


@dataclass(frozen=True, slots=True)
class ExpectedHint:
    """A session whose hint should be here at `at_ns`: `length` tokens, if it comes, with chance `trust`.

    In the mean it comes at `mean_ns`. It takes the place of draft tokens of these chances (`instead`).
    """

    at_ns: float
    mean_ns: float
    length: int
    alpha: float
    trust: float
    fallback: tuple[float, ...] = ()

    def survival(self, passes_late: int) -> list[float]:
        """Of each of its tokens that is left, when it comes so many plain passes too late."""
        return [self.trust * self.alpha ** (i + 1) for i in range(passes_late, min(self.length, _MOST_ROWS))]


def linger_until(
    due: Sequence[ExpectedHint],
    *,
    sessions: int,
    now: int,
    latest: int,
    step_ns: StepNs,
    ready: Sequence[float] = (),
) -> int | None:
    """Until when a pass of `sessions` rows had better wait for some of the `due`; None: not at all.

    Never beyond `latest`. `here` are the chances of the other sessions' draft tokens, which are here already.
    """
    best: int | None = None
    best_gain = 1.0
    coming = sorted((one for one in due if now < one.at_ns <= latest), key=lambda one: one.at_ns)
    for count in _counts(len(coming)):
        awaited = coming[:count]
        wait_ns = max(0.0, max(one.mean_ns for one in awaited) - now)
        others = [chance for one in coming[count:] for chance in one.fallback]
        gain = _gain(awaited, wait_ns, sessions, step_ns, [*ready, *others])
        if gain > best_gain:
            best, best_gain = math.ceil(awaited[-1].at_ns), gain
    return best


def _counts(most: int) -> list[int]:
    """Of the first how many the waiting is looked at: each power of two, and all."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most] if most else []


def _gain(
    due: Sequence[ExpectedHint],
    wait_ns: float,
    sessions: int,
    step_ns: StepNs,
    ready: Sequence[float],
) -> float:
    """How many times as many tokens per time lingering confirms as going on does."""
    tokens, took_ns = _step([*ready, *_left(due, 0)], sessions, step_ns)
    lingering = tokens / (wait_ns + took_ns)
    # Going on, whoever has a hint has another by the next pass.
    tokens, took_ns = _step([*ready, *(chance for one in due for chance in one.fallback)], sessions, step_ns)
    late = math.ceil(wait_ns / took_ns)
    last, last_ns = _step([*ready, *_left(due, late)], sessions, step_ns)
    return lingering / ((late * tokens + last) / (late * took_ns + last_ns))


def _left(due: Sequence[ExpectedHint], late: int) -> list[float]:
    """The chances of the tokens that are left of these hints when they are so many passes late."""
    return [chance for one in due for chance in one.survival(late)]


def _step(chances: Sequence[float], sessions: int, step_ns: StepNs) -> tuple[float, float]:
    """The tokens of a pass with such of these draft rows as pay, and its time; not every count is tried."""
    tokens = list(accumulate(sorted(chances, reverse=True), initial=float(sessions)))
    most = len(chances)
    tried = [*range(0, most, 1 + most // _TRIED_ROWS), most]
    rows = max(tried, key=lambda rows: tokens[rows] / step_ns(sessions + rows, rows))
    return tokens[rows], step_ns(sessions + rows, rows)


class LingerPolicy:
    """Whether to wait, from plan to plan: no pass is put off twice, nor longer than `max_ns` in all.

    `waited_ns` is how long the last pass asked about has been put off so far.
    """

    def __init__(self, max_ns: int, pass_ns: StepNs) -> None:
        self._max_ns = max_ns
        self._step_ns = pass_ns
        self.waited_ns = 0
        self._since_ns: int | None = None
        self._until_ns = 0
        self._awaited: set[int] = set()

    def until(self, items: Sequence[ActiveRequest], now: int) -> int | None:
        """Until when the pass of these items had better wait; None: begin it. Their hints were looked at.

        That is made out once a pass: then it begins as soon as all that are awaited are here.
        """
        self.waited_ns = 0 if self._since_ns is None else now - self._since_ns
        if self._max_ns == 0 or any(item.uncomputed > 1 for item in items):
            self._forget()
            return None
        if self._since_ns is None:
            until = self._worth_until(items, now)
            if until is not None:
                self._since_ns, self._until_ns = now, until
            return until
        missed = [item for item in items if item.id in self._awaited and _awaits(item)]
        if missed and now < self._until_ns:
            return self._until_ns
        for item in missed:
            item.statistics.hint_timing.record_absence()
            item.hint_due = False  # until it is said again
        self._forget()
        return None

    def _worth_until(self, items: Sequence[ActiveRequest], now: int) -> int | None:
        due = {item.id: _due(item) for item in items if _awaits(item)}
        if not due:
            return None
        until = linger_until(
            list(due.values()),
            sessions=len(items),
            now=now,
            latest=now + self._max_ns,
            step_ns=self._step_ns,
            ready=[chance for item in items if item.id not in due for chance in item.survival()[:_MOST_ROWS]],
        )
        self._awaited = {key for key, one in due.items() if until is not None and now < one.at_ns <= until}
        return until

    def _forget(self) -> None:
        self._since_ns = None
        self._awaited = set()


def _awaits(item: ActiveRequest) -> bool:
    """Has it no hint, but one is due?"""
    return item.hint_due and item.room > 0 and not item.has_usable_hint


def _due(item: ActiveRequest) -> ExpectedHint:
    habits, acceptance = item.statistics.hint_timing, item.statistics.acceptance
    length = min(round(habits.length), item.room)
    mean_ns, at_ns = habits.expected_at(item.result_ns)
    instead = tuple(item.survival()[:_MOST_ROWS])
    return ExpectedHint(at_ns, mean_ns, length, acceptance.alpha, habits.trust, instead)

"""Lingering: when to delay a step for a hint that is about to arrive.

Two ways to the same point are compared. *Linger*: wait until the expected hints should have arrived, then run
one step with them. *Go on*: run as many plain steps as fit into that time, then a step with what is left of
the late hints. The way that confirms more expected tokens per time is taken. All sessions of the step pay for
the wait, so with many sessions it seldom pays. Hints that have arrived are used either way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from galley.core.cost.model import StepNs
from galley.core.scheduler.request import ActiveRequest

# Tokens of one hint that count when the wait for it is weighed.
_MOST_ROWS = 16
# About how many counts of draft rows are tried for a step.
_TRIED_ROWS = 32


@dataclass(frozen=True, slots=True)
class ExpectedHint:
    """A hint that should arrive by `at_ns`, on average at `mean_ns`: `length` tokens, with chance `trust`.

    `fallback` are the chances of the draft tokens that it replaces.
    """

    at_ns: float
    mean_ns: float
    length: int
    alpha: float
    trust: float
    fallback: tuple[float, ...] = ()

    def survival(self, steps_late: int) -> list[float]:
        """Return the survival of each token left if the hint arrives `steps_late` plain steps late."""
        return [self.trust * self.alpha ** (i + 1) for i in range(steps_late, min(self.length, _MOST_ROWS))]


def linger_until(
    due: Sequence[ExpectedHint],
    *,
    sessions: int,
    now: int,
    latest: int,
    step_ns: StepNs,
    ready: Sequence[float] = (),
) -> int | None:
    """Return until when a step of `sessions` rows should wait for some of the `due` hints; None: not at all.

    The time is at most `latest`. `ready` are the chances of the draft tokens that other sessions have.
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
    """Return how many of the first hints to consider waiting for: each power of two, and all."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most] if most else []


def _gain(
    due: Sequence[ExpectedHint],
    wait_ns: float,
    sessions: int,
    step_ns: StepNs,
    ready: Sequence[float],
) -> float:
    tokens, took_ns = _step([*ready, *_left(due, 0)], sessions, step_ns)
    lingering = tokens / (wait_ns + took_ns)
    # When going on, the sessions that have a hint are assumed to have another by the next step.
    tokens, took_ns = _step([*ready, *(chance for one in due for chance in one.fallback)], sessions, step_ns)
    late = math.ceil(wait_ns / took_ns)
    last, last_ns = _step([*ready, *_left(due, late)], sessions, step_ns)
    return lingering / ((late * tokens + last) / (late * took_ns + last_ns))


def _left(due: Sequence[ExpectedHint], late: int) -> list[float]:
    return [chance for one in due for chance in one.survival(late)]


def _step(chances: Sequence[float], sessions: int, step_ns: StepNs) -> tuple[float, float]:
    """Return the expected tokens and the time of a step with the draft rows that pay; samples the counts."""
    tokens = list(accumulate(sorted(chances, reverse=True), initial=float(sessions)))
    most = len(chances)
    tried = [*range(0, most, 1 + most // _TRIED_ROWS), most]
    rows = max(tried, key=lambda rows: tokens[rows] / step_ns(sessions + rows, rows))
    return tokens[rows], step_ns(sessions + rows, rows)


class LingerPolicy:
    """A policy that decides whether a step waits: at most once per step, and for at most `max_ns`.

    `waited_ns` is how long the step of the last call has been delayed so far.
    """

    def __init__(self, max_ns: int, step_ns: StepNs) -> None:
        self._max_ns = max_ns
        self._step_ns = step_ns
        self.waited_ns = 0
        self._since_ns: int | None = None
        self._until_ns: int  # set with `_since_ns`
        self._awaited: set[int] = set()

    def until(self, requests: Sequence[ActiveRequest], now: int) -> int | None:
        """Return until when a step of `requests` should wait; None: begin it. Update their hints first."""
        self.waited_ns = 0 if self._since_ns is None else now - self._since_ns
        if self._max_ns == 0 or any(request.uncomputed > 1 for request in requests):
            self.forget()
            return None
        if self._since_ns is None:
            until = self._worth_until(requests, now)
            if until is not None:
                self._since_ns, self._until_ns = now, until
            return until
        missed = [request for request in requests if request.id in self._awaited and _awaits(request)]
        if missed and now < self._until_ns:
            return self._until_ns
        for request in missed:
            request.statistics.hint_timing.record_absence()
            request.hint_due = False  # until an extension sets it again
        self.forget()
        return None

    def _worth_until(self, requests: Sequence[ActiveRequest], now: int) -> int | None:
        due = {request.id: _due(request) for request in requests if _awaits(request)}
        if not due:
            return None
        until = linger_until(
            list(due.values()),
            sessions=len(requests),
            now=now,
            latest=now + self._max_ns,
            step_ns=self._step_ns,
            ready=[
                chance
                for request in requests
                if request.id not in due
                for chance in request.survival()[:_MOST_ROWS]
            ],
        )
        self._awaited = {key for key, one in due.items() if until is not None and now < one.at_ns <= until}
        return until

    def forget(self) -> None:
        """Stop delaying the step, whose requests are gone or whose delay has ended."""
        self._since_ns = None
        self._awaited = set()


def _awaits(request: ActiveRequest) -> bool:
    return request.hint_due and request.room > 0 and not request.has_usable_hint


def _due(request: ActiveRequest) -> ExpectedHint:
    timing, acceptance = request.statistics.hint_timing, request.statistics.acceptance
    length = min(round(timing.length), request.room)
    mean_ns, at_ns = timing.expected_at(request.result_ns)
    fallback = tuple(request.survival()[:_MOST_ROWS])
    return ExpectedHint(at_ns, mean_ns, length, acceptance.alpha, timing.trust, fallback)

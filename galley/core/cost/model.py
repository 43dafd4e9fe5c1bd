"""The cost and the gain of speculation: the arithmetic behind `galley plan` and the choice of k.

The unit of cost is one plain decoding step of the target over one session (a *target step*). The *draft cost
ratio* is the number of draft steps that cost as much; infinity means that drafts are free, as prompt lookup
nearly is. The expected yield of a round is eq. 1 of Leviathan, Kalman, Matias 2023 (arXiv 2211.17192, section
3.1). Its cost follows section 3.3, with the row-cost curve in place of the assumption that a step costs the
same however many tokens it verifies.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol

from galley.core.errors import InvalidField, check_range

MAX_K = 256
_BISECTIONS = 50
# How many powers of two have a factor, and the weight of one step in it.
_FACTORS = 11
_WEIGHT = 0.05
# How far a step without draft tokens draws the factor of those with some. Without this, draft rows that look
# dear would never be verified again, and a lower cost never be noticed.
_FORGET = 0.002
# Rows of which times are remembered.
_MOST_KNOWN = 1024
# Bound of a factor: a single step may have been interrupted.
_MOST = 4.0
_MORE_ROWS = range(4, 36, 4)


@dataclass(frozen=True, slots=True)
class Plan:
    """The cost of an answer: target passes, draft steps, their cost in target steps, and tokens / cost."""

    passes: int
    draft_steps: int
    cost: float
    gain: float


def plan(tokens: int, k: int, confirmed_per_round: float, draft_cost_ratio: float) -> Plan:
    """Return the cost of `tokens` output tokens if a round of k draft tokens confirms that many.

    A pass counts as one target step however many tokens it verifies. Raises InvalidField.
    """
    check_range("tokens", tokens, least=1)
    check_range("k", k, least=0, most=MAX_K)
    check_range("confirmed_per_round", confirmed_per_round, least=1, most=k + 1)
    _check_ratio(draft_cost_ratio)
    # 69 / 2.3 is 30.000000000000004 in floats, and yet 30 passes.
    passes = math.ceil(tokens / confirmed_per_round - 1e-9)
    draft_steps = passes * k
    cost = passes + draft_steps / draft_cost_ratio
    return Plan(passes, draft_steps, cost, tokens / cost)


def expected_confirmed(alpha: float, k: int) -> float:
    """Return the mean tokens that a round of k draft tokens confirms: (1 - alpha^(k+1)) / (1 - alpha).

    `alpha` is the chance that a draft token is accepted if all before it were. Raises InvalidField.
    """
    check_range("alpha", alpha, least=0, most=1)
    check_range("k", k, least=0, most=MAX_K)
    # The geometric sum itself: exact at alpha = 1, where the closed form loses all its digits.
    total = 1.0
    for _ in range(k):
        total = 1.0 + alpha * total
    return total


@dataclass(frozen=True, slots=True)
class RowCostCurve:
    """The cost of a target step over a number of rows (tokens of all its sessions), relative to one row.

    Linear between the points and beyond the last. Raises InvalidField unless rows rise from 1, the cost of
    one row is 1, and every cost is positive.
    """

    points: tuple[tuple[int, float], ...] = ((1, 1.0),)

    def __post_init__(self) -> None:
        if not self.points or self.points[0] != (1, 1.0):
            raise InvalidField("row_costs", f'must start with 1:1, the cost of one row, got "{self}"')
        if any(left[0] >= right[0] for left, right in pairwise(self.points)):
            raise InvalidField("row_costs", f'rows must rise from point to point, got "{self}"')
        for rows, cost in self.points:
            if not (math.isfinite(cost) and cost > 0):
                raise InvalidField("row_costs", f"the cost of {rows} rows must be finite and > 0, got {cost}")

    @classmethod
    def parse(cls, text: str) -> RowCostCurve:
        """Parse "1:1,5:1.05,8:1.1": rows and relative cost. Raise InvalidField."""
        try:
            pairs = [point.split(":") for point in text.split(",")]
            return cls(tuple((int(rows), float(cost)) for rows, cost in pairs))
        except ValueError as error:
            raise InvalidField(
                "row_costs", f'must look like "1:1,5:1.05,8:1.1" (rows:cost), got {text!r}'
            ) from error

    def __str__(self) -> str:
        """Return what `parse` reads, to three decimals."""
        return ",".join(f"{rows}:{round(cost, 3):g}" for rows, cost in self.points)

    def __call__(self, rows: int) -> float:
        """Return the cost of a step over `rows` >= 1 rows, in target steps. Raise InvalidField."""
        check_range("rows", rows, least=1)
        if len(self.points) == 1:
            return self.points[0][1]
        right = min(bisect_right(self.points, rows, key=_rows_of), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[right - 1], self.points[right]
        slope = (y1 - y0) / (x1 - x0)
        if rows > x1:
            return y1 + max(slope, 0.0) * (rows - x1)
        return y0 + slope * (rows - x0)


def _rows_of(point: tuple[int, float]) -> int:
    return point[0]


FLAT = RowCostCurve()


def round_cost(k: int, draft_cost_ratio: float, curve: RowCostCurve = FLAT, sessions: int = 1) -> float:
    """Return the cost, in target steps, of a round of `sessions` sessions that each verify k draft tokens.

    The draft steps are batched too and follow the same row-cost curve. Raises InvalidField.
    """
    check_range("k", k, least=0, most=MAX_K)
    check_range("sessions", sessions, least=1)
    _check_ratio(draft_cost_ratio)
    return curve(sessions * (k + 1)) + k * curve(sessions) / draft_cost_ratio


def gain(
    alpha: float, k: int, draft_cost_ratio: float, curve: RowCostCurve = FLAT, sessions: int = 1
) -> float:
    """Return the speed-up over plain decoding with as many sessions: 1 at k = 0. Raise InvalidField."""
    return expected_confirmed(alpha, k) * (curve(sessions) / round_cost(k, draft_cost_ratio, curve, sessions))


def best_k(
    alpha: float,
    draft_cost_ratio: float,
    curve: RowCostCurve = FLAT,
    sessions: int = 1,
    max_k: int = 16,
) -> int:
    """Return the smallest k in [0, max_k] with the highest gain; 0 where nothing pays. Raise InvalidField."""
    check_range("max_k", max_k, least=0, most=MAX_K)
    check_range("alpha", alpha, least=0, most=1)
    plain = curve(sessions)
    best, best_gain = 0, 1.0
    confirmed = 1.0
    for k in range(1, max_k + 1):
        confirmed = 1.0 + alpha * confirmed
        this = confirmed * (plain / round_cost(k, draft_cost_ratio, curve, sessions))
        if this > best_gain:
            best, best_gain = k, this
    return best


def break_even_alpha(
    draft_cost_ratio: float, curve: RowCostCurve = FLAT, max_k: int = 16, sessions: int = 1
) -> float | None:
    """Return the alpha above which some k in [1, max_k] beats plain decoding; None if none does at alpha 1.

    The best gain rises with alpha, so bisection finds where it leaves 1. Raises InvalidField.
    """
    check_range("max_k", max_k, least=1, most=MAX_K)

    def pays(alpha: float) -> bool:
        return best_k(alpha, draft_cost_ratio, curve, sessions, max_k) > 0

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return 0.0 if low == 0.0 else high


def _check_ratio(draft_cost_ratio: float) -> None:
    # Also catches NaN; infinity is a draft that costs nothing.
    if not draft_cost_ratio > 0:
        raise InvalidField("draft_cost_ratio", f"must be > 0, got {draft_cost_ratio:g}")


class StepNs(Protocol):
    """The time of a step over `rows` >= 1 rows, of which `drafts` are draft tokens, in nanoseconds."""

    def __call__(self, rows: int, drafts: int) -> float: ...


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured times of a replica's steps by number of rows, in ns; those in use are remembered."""

    one_row_ns: int
    curve: RowCostCurve
    _known: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def measured(cls, points: Sequence[tuple[int, int]]) -> StepTimes:
        """Return the times from measured (rows, ns), the first for one row; more rows never cost less.

        Raises InvalidField unless rows rise from 1 and the first time is positive.
        """
        if not points or points[0][1] <= 0:
            raise InvalidField("row_costs", f"must start with the time of one row, > 0 ns, got {points[:1]}")
        one_row_ns = points[0][1]
        rising = accumulate((ns for _, ns in points), max)
        return cls(
            one_row_ns,
            RowCostCurve(
                tuple((rows, ns / one_row_ns) for (rows, _), ns in zip(points, rising, strict=True))
            ),
        )

    def __call__(self, rows: int) -> int:
        took_ns = self._known.get(rows)
        if took_ns is None:
            took_ns = round(self.one_row_ns * self.curve(rows))
            if rows <= _MOST_KNOWN:
                self._known[rows] = took_ns
        return took_ns

    @property
    def points(self) -> tuple[tuple[int, int], ...]:
        return tuple((rows, round(cost * self.one_row_ns)) for rows, cost in self.curve.points)


def rows_that_pay(
    worth: Sequence[float],
    *,
    tokens: float,
    rows: int,
    step_ns: StepNs,
    room: int,
    prompts_ns: float,
) -> int:
    """Return how many draft rows to add to a step so that it confirms most expected tokens per time.

    `worth` are the expected tokens that each draft row adds, most first; without them the step confirms
    `tokens` over `rows` >= 1 rows. Every count up to `room` is tried, because the curve has plateaus. The
    time of prompts, `prompts_ns`, is left out: next to a long prompt every draft token would pay.
    """
    took_ns = step_ns(rows, 0) - prompts_ns
    best, best_rate = 0, tokens / took_ns
    for count, gained in enumerate(worth[: max(0, room)], 1):
        tokens += gained
        took_ns = max(took_ns, step_ns(rows + count, count) - prompts_ns)
        rate = tokens / took_ns
        if rate > best_rate:
            best, best_rate = count, rate
    return best


class LiveStepTimes:
    """`StepTimes` corrected by the steps of the replica, so that a bad measurement at start is repaired.

    A correction factor is kept for 1, 2, 4, ... rows. A step moves the nearest two, and those that no step
    has come near. Steps with draft tokens have factors of their own: the draft may work on the same machine.
    """

    __slots__ = ("_apart", "_drafted", "_known", "_measured", "_plain", "_seen")

    def __init__(self, measured: StepTimes) -> None:
        self._measured = measured
        self._known: dict[int, tuple[int, int, float]] = {}
        self._plain = [1.0] * _FACTORS
        self._seen = [False] * _FACTORS
        # The plain factor until a step with drafts has come near.
        self._drafted = [1.0] * _FACTORS
        self._apart = [False] * _FACTORS

    def __call__(self, rows: int, drafts: int) -> int:
        measured_ns, below, share = self._known.get(rows) or self._place(rows)
        factor = _between(self._plain, below, share)
        if drafts:
            # A plain step may be the slower one: a draft on the same machine works until its hint is there.
            factor = max(factor, _between(self._drafted, below, share))
        return max(1, round(measured_ns * factor))

    def added_row_ns(self, rows: int) -> int:
        """Return the ns that a draft row adds to `rows` rows, for the cheapest number of added rows."""
        took_ns = self(rows, 0)
        return max(0, min((self(rows + more, more) - took_ns) // more for more in _MORE_ROWS))

    def record(self, rows: int, drafts: int, took_ns: int) -> None:
        """Record that a step over `rows` >= 1 rows took `took_ns`; ignored if that is not positive."""
        if took_ns <= 0:
            return
        measured_ns, below, share = self._known.get(rows) or self._place(rows)
        factor = min(max(took_ns / measured_ns, 1.0 / _MOST), _MOST)
        learn = self._learn_drafted if drafts else self._learn_plain
        for i, is_seen in enumerate(self._seen):
            if i == below:
                learn(i, 1.0 - share, factor)
            elif i == below + 1:
                learn(i, share, factor)
            elif not is_seen:
                learn(i, 0.0, factor)

    def _learn_plain(self, i: int, near: float, factor: float) -> None:
        self._plain[i] += _WEIGHT * (near if self._seen[i] else 1.0) * (factor - self._plain[i])
        self._seen[i] = self._seen[i] or near > 0.0
        if self._apart[i]:
            self._drafted[i] += _FORGET * near * (self._plain[i] - self._drafted[i])
        else:
            self._drafted[i] = self._plain[i]

    def _learn_drafted(self, i: int, near: float, factor: float) -> None:
        if near > 0.0:
            self._drafted[i] += _WEIGHT * near * (factor - self._drafted[i])
            self._apart[i] = True
        if not self._seen[i]:
            self._plain[i] += _WEIGHT * (factor - self._plain[i])
            if not self._apart[i]:
                self._drafted[i] = self._plain[i]

    def _place(self, rows: int) -> tuple[int, int, float]:
        """Return the measured ns, and where `rows` is between two powers of two; those in use are remembered.

        The place is the exponent of the lower one, and the share of the way to the upper.
        """
        below = min(rows.bit_length() - 1, _FACTORS - 2)
        place = self._measured(rows), below, min(1.0, rows / (1 << below) - 1.0)
        if rows <= _MOST_KNOWN:
            self._known[rows] = place
        return place


def _between(factors: Sequence[float], below: int, share: float) -> float:
    return factors[below] + share * (factors[below + 1] - factors[below])

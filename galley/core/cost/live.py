"""Step times of a running replica: the curve measured at start, corrected by what steps really take."""

from __future__ import annotations

from galley.core.cost.model import StepTimes

# How many powers of two have a factor, and the weight of one step in it.
_FACTORS = 11
_WEIGHT = 0.05
# How far a step without draft tokens draws the factor of those with some. Without this, draft rows that look
# dear would never be verified again, and a lower cost never be noticed.
_FORGET = 0.002
# Bound of a factor: a single step may have been interrupted.
_MOST = 4.0
_MORE_ROWS = range(4, 36, 4)


class LiveStepTimes:
    """`StepTimes` corrected by the steps of the replica, so that a bad measurement at start is repaired.

    A correction factor is kept for 1, 2, 4, ... rows. A step moves the nearest two, and those that no step
    has come near. Steps with draft tokens have factors of their own: the draft may work on the same machine.
    """

    __slots__ = ("_drafted", "_measured", "_plain", "_seen")

    def __init__(self, measured: StepTimes) -> None:
        self._measured = measured
        self._plain = [1.0] * _FACTORS
        self._seen = [False] * _FACTORS
        # None until a step with drafts has come near; the plain factor holds then.
        self._drafted: list[float | None] = [None] * _FACTORS

    def __call__(self, rows: int, drafts: int) -> int:
        below, share = _place(rows)
        low, high = self._factor(below, drafts), self._factor(below + 1, drafts)
        return max(1, round(self._measured(rows) * (low + share * (high - low))))

    def _factor(self, i: int, drafts: int) -> float:
        drafted = self._drafted[i]
        return self._plain[i] if drafted is None or not drafts else drafted

    def added_row_ns(self, rows: int) -> int:
        """Return the ns that a draft row adds to `rows` rows, for the cheapest number of added rows."""
        took_ns = self(rows, 0)
        return max(0, min((self(rows + more, more) - took_ns) // more for more in _MORE_ROWS))

    def record(self, rows: int, drafts: int, took_ns: int) -> None:
        """Record that a step over `rows` >= 1 rows took `took_ns`; ignored if that is not positive."""
        if took_ns <= 0:
            return
        factor = min(max(took_ns / self._measured(rows), 1.0 / _MOST), _MOST)
        below, share = _place(rows)
        near = {below: 1.0 - share, below + 1: share}
        for i in range(_FACTORS):
            if drafts:
                self._learn_drafted(i, near.get(i, 0.0), factor)
            else:
                self._learn_plain(i, near.get(i, 0.0), factor)

    def _learn_plain(self, i: int, near: float, factor: float) -> None:
        self._plain[i] += _WEIGHT * (near if self._seen[i] else 1.0) * (factor - self._plain[i])
        self._seen[i] = self._seen[i] or near > 0.0
        drafted = self._drafted[i]
        if drafted is not None:
            self._drafted[i] = drafted + _FORGET * near * (self._plain[i] - drafted)

    def _learn_drafted(self, i: int, near: float, factor: float) -> None:
        if near > 0.0:
            before = self._factor(i, drafts=1)
            self._drafted[i] = before + _WEIGHT * near * (factor - before)
        if not self._seen[i]:
            self._plain[i] += _WEIGHT * (factor - self._plain[i])


def _place(rows: int) -> tuple[int, float]:
    """Return the powers of two around `rows`: (exponent of the lower, share of the way to the upper)."""
    below = min(rows.bit_length() - 1, _FACTORS - 2)
    return below, min(1.0, rows / (1 << below) - 1.0)

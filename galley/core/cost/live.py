"""What passes take while a replica runs: the curve that was measured at start, and what became of it."""

from __future__ import annotations

from galley.core.cost.model import StepTimes

# The powers of two for which a factor is kept, and the share of it that one pass decides.
_FACTORS = 11
_WEIGHT = 0.05
# How far a pass without draft tokens draws the factor of those with any: else nobody would ever notice that
# they have become cheap, for none would be verified.
_FORGET = 0.002
# How many times as long, or as short, as measured a pass is believed to take: one may have been interrupted.
_MOST = 4.0
# How many more rows a pass is looked at with.
_MORE_ROWS = range(4, 36, 4)


class LiveStepTimes:
    """`StepTimes` corrected by what passes really take, so that a bad start is made good while it runs.

    The factor between the two is kept for 1, 2, 4, ... rows, and lies on lines between them. One pass moves
    the nearest two; those that no pass has come near yet go along, as all of the machine may be slower.

    Passes with draft tokens have factors of their own: where there are any the draft works too, perhaps on
    the same machine, and one curve for all would make them look cheaper than they are.
    """

    __slots__ = ("_drafted", "_measured", "_plain", "_seen")

    def __init__(self, measured: StepTimes) -> None:
        self._measured = measured
        self._plain = [1.0] * _FACTORS
        self._seen = [False] * _FACTORS
        # As plain ones until a pass has come near.
        self._drafted: list[float | None] = [None] * _FACTORS

    def __call__(self, rows: int, drafts: int) -> int:
        """Nanoseconds of a pass over `rows` >= 1 rows, of which `drafts` are draft tokens."""
        below, share = _place(rows)
        low, high = self._factor(below, drafts), self._factor(below + 1, drafts)
        return max(1, round(self._measured(rows) * (low + share * (high - low))))

    def _factor(self, i: int, drafts: int) -> float:
        drafted = self._drafted[i]
        return self._plain[i] if drafted is None or not drafts else drafted

    def added_row_ns(self, rows: int) -> int:
        """Nanoseconds that a draft row adds to `rows` rows, if as many are added as makes it cheapest.

        Of steps, that is what filling them comes to: a pass takes as many draft rows as pay.
        """
        took_ns = self(rows, 0)
        return max(0, min((self(rows + more, more) - took_ns) // more for more in _MORE_ROWS))

    def record(self, rows: int, drafts: int, took_ns: int) -> None:
        """A pass over `rows` >= 1 rows took this long; nothing is learned of one that took no time."""
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
    """Between which powers of two, as (the exponent of the lower, share of the way to the upper)."""
    below = min(rows.bit_length() - 1, _FACTORS - 2)
    return below, min(1.0, rows / (1 << below) - 1.0)

"""What passes take while a replica runs: the curve that was measured at start, and what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.core.cost import PassTimes

# The powers of two for which a factor is kept, and the share of it that one pass decides.
_FACTORS = 11
_FACTOR_WEIGHT = 0.05
# How many times as long, or as short, as measured a pass is believed to take: one may have been interrupted.
_MOST = 4.0
# How many more rows a pass is looked at with.
_MORE_ROWS = range(4, 36, 4)


class LivePassTimes:
    """`PassTimes` corrected by what passes really take, so that a bad start is made good while it runs.

    The factor between the two is kept for 1, 2, 4, ... rows, and lies on lines between them. One pass moves
    the nearest two; those that no pass has come near yet go along, as all of the machine may be slower.
    """

    __slots__ = ("_factors", "_measured", "_seen")

    def __init__(self, measured: PassTimes) -> None:
        self._measured = measured
        self._factors = [1.0] * _FACTORS
        self._seen = [False] * _FACTORS

    def __call__(self, rows: int) -> int:
        """Nanoseconds of a pass over `rows` >= 1 rows."""
        below, share = _place(rows)
        low, high = self._factors[below], self._factors[below + 1]
        return max(1, round(self._measured(rows) * (low + share * (high - low))))

    def of_a_row(self, rows: int) -> int:
        """Nanoseconds that a row adds to a pass over `rows` rows, if as many are added as makes it cheapest.

        Of steps, that is what filling them comes to: a pass takes as many draft rows as pay.
        """
        took_ns = self(rows)
        return max(0, min((self(rows + more) - took_ns) // more for more in _MORE_ROWS))

    def saw(self, rows: int, took_ns: int) -> None:
        """A pass over `rows` >= 1 rows took this long; nothing is learned of one that took no time."""
        if took_ns <= 0:
            return
        factor = min(max(took_ns / self._measured(rows), 1.0 / _MOST), _MOST)
        below, share = _place(rows)
        near = {below: 1.0 - share, below + 1: share}
        for i in range(_FACTORS):
            weight = near.get(i, 0.0) if self._seen[i] else 1.0
            self._factors[i] += _FACTOR_WEIGHT * weight * (factor - self._factors[i])
            self._seen[i] = self._seen[i] or near.get(i, 0.0) > 0.0


def _place(rows: int) -> tuple[int, float]:
    """Between which powers of two, as (the exponent of the lower, share of the way to the upper)."""
    below = min(rows.bit_length() - 1, _FACTORS - 2)
    return below, min(1.0, rows / (1 << below) - 1.0)

"""When a verdict is late, by a prediction from step times and the rows queued before it.

A session leaves a replica that takes several times as long as predicted, if another of its build can take it.
To keep sessions from moving back and forth, the prediction includes a long prefill, a full queue, and how
much longer than predicted recent verdicts took. A verdict is never late within `LEAST_NS`, and a session that
has moved waits twice as long before it moves again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from galley.core.cost.model import StepTimes
from galley.core.errors import InvalidField

SLOW_FACTOR = 8.0
"""Default of how many times as long as expected a verdict may take."""
LEAST_NS = 1_000_000_000
"""Shorter delays are lingering, the network or a garbage collector."""
ROWS_OF_A_SESSION = 64
"""Rows assumed to be queued for each session of other gateways."""

# Bound of the measured slowdown, and the weight of one verdict in it.
_MOST_SLOWER = 16.0
_WEIGHT = 0.1
# First verdicts kept for quantiles, and how many a quantile needs.
_MOST_FIRSTS = 256
_LEAST_FIRSTS = 16
# Most doublings of a session's timeout, and after how many verdicts in time one is taken back.
_MOST_DOUBLINGS = 6
_FORGIVEN_AFTER = 64


class VerdictTimes:
    def __init__(self, row_costs: Sequence[tuple[int, int]] = ()) -> None:
        """Take the replica's (rows, ns of a step). An invalid curve predicts nothing."""
        self._times: StepTimes | None = None
        self._slower = 1.0
        self._firsts: deque[int] = deque(maxlen=_MOST_FIRSTS)
        if row_costs:
            try:
                self._times, self._most_rows = StepTimes.measured(row_costs), row_costs[-1][0]
                self._largest_ns = self._times(self._most_rows)
            except InvalidField:
                return  # the replica is not trusted

    def predicted_ns(self, rows: int) -> int:
        """Return the ns to a verdict with `rows` rows to compute before it and for it; 0 without a curve.

        Counts the steps that the rows fill, and assumes that a full step is running when the request arrives.
        """
        if self._times is None:
            return 0
        passes, rest = divmod(max(1, rows), self._most_rows)
        return self._largest_ns * (passes + 1) + (self._times(rest) if rest else 0)

    def slowed_ns(self, predicted_ns: int) -> int:
        """Return how long it takes by the measured slowdown."""
        return round(self._slower * predicted_ns)

    def first_verdict_quantile(self, quantile: float) -> int | None:
        """Return this quantile of recent first verdicts, in ns; None while there are too few."""
        if len(self._firsts) < _LEAST_FIRSTS:
            return None
        return sorted(self._firsts)[min(len(self._firsts) - 1, int(quantile * len(self._firsts)))]

    def record_first(self, waited_ns: int) -> None:
        self._firsts.append(waited_ns)

    def record(self, predicted_ns: int, waited_ns: int) -> None:
        if predicted_ns > 0:
            slower = min(max(waited_ns / predicted_ns, 1.0), _MOST_SLOWER)
            self._slower += _WEIGHT * (slower - self._slower)


class VerdictTimeout:
    """The time that one session waits for a verdict before it looks for another replica."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._doublings = 0
        self._in_time = 0

    def limit_ns(self, expected_ns: int) -> int:
        return round(max(LEAST_NS, self._factor * expected_ns)) << self._doublings

    def record_late(self) -> None:
        """Record that the session left a replica for being late."""
        self._doublings = min(self._doublings + 1, _MOST_DOUBLINGS)
        self._in_time = 0

    def record_in_time(self) -> None:
        self._in_time += 1
        if self._in_time >= _FORGIVEN_AFTER:
            self._doublings = max(0, self._doublings - 1)
            self._in_time = 0

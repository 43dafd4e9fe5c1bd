"""When a verdict is late: it was predicted from what passes take and how many rows are queued before it.

A session leaves a replica that takes several times as long as that, if another of its build can take it. What
keeps sessions from being thrown to and fro: a long prefill and a full queue are part of the prediction; so is
how much longer than predicted verdicts have taken there of late, as on a machine that others use too; a
verdict is never late within `LEAST_NS`; and a session that has left waits twice as long before it does again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from galley.core.cost.model import StepTimes
from galley.core.errors import InvalidField

SLOW_FACTOR = 8.0
"""How many times as long as expected a verdict may take, unless the settings say otherwise."""
LEAST_NS = 1_000_000_000
"""Less is lingering, the network, or a pause of somebody's garbage collector."""
ROWS_OF_A_SESSION = 64
"""What is assumed to be queued for each session of other gateways."""

# How many times as long as predicted verdicts are believed to take, and what one of them counts.
_MOST_SLOWER = 16.0
_WEIGHT = 0.1
# First verdicts that quantiles are of, and from how many on there are any.
_MOST_FIRSTS = 256
_LEAST_FIRSTS = 16
# A session's patience doubles so often at most, and falls by one doubling after so many verdicts in time.
_MOST_DOUBLINGS = 6
_FORGIVEN_AFTER = 64


class VerdictTimes:
    """Of one replica. Times in nanoseconds."""

    def __init__(self, row_costs: Sequence[tuple[int, int]] = ()) -> None:
        """`row_costs` is the replica's own curve, (rows, ns of a pass); one that is none predicts nothing."""
        self._times: StepTimes | None = None
        self._slower = 1.0
        self._firsts: deque[int] = deque(maxlen=_MOST_FIRSTS)
        if row_costs:
            try:
                self._times, self._most_rows = StepTimes.measured(row_costs), row_costs[-1][0]
            except InvalidField:
                return  # a replica may say anything

    def predicted_ns(self, rows: int) -> int:
        """Until the verdict of an item, once so many rows are to be computed before it and for it.

        That is as many of the largest passes as they fill, and the one that is under way when it comes.
        """
        if self._times is None:
            return 0
        largest_ns = self._times(self._most_rows)
        passes, rest = divmod(max(1, rows), self._most_rows)
        return largest_ns * (passes + 1) + (self._times(rest) if rest else 0)

    def expected_ns(self, rows: int) -> int:
        """The same as verdicts have been of late."""
        return round(self._slower * self.predicted_ns(rows))

    def first_verdict_quantile(self, quantile: float) -> int | None:
        """How long an item's first verdict must take to be later than this share of the last ones."""
        if len(self._firsts) < _LEAST_FIRSTS:
            return None
        return sorted(self._firsts)[min(len(self._firsts) - 1, int(quantile * len(self._firsts)))]

    def record_first(self, waited_ns: int) -> None:
        """An item's first verdict came."""
        self._firsts.append(waited_ns)

    def record(self, predicted_ns: int, waited_ns: int) -> None:
        """A verdict came."""
        if predicted_ns > 0:
            slower = min(max(waited_ns / predicted_ns, 1.0), _MOST_SLOWER)
            self._slower += _WEIGHT * (slower - self._slower)


class VerdictTimeout:
    """Of one session: how long it waits for a verdict before it looks for another replica."""

    def __init__(self, factor: float) -> None:
        """`factor` is how many times as long as expected a verdict may take."""
        self._factor = factor
        self._doublings = 0
        self._in_time = 0

    def limit_ns(self, expected_ns: int) -> int:
        """How long this verdict may take, in nanoseconds."""
        return round(max(LEAST_NS, self._factor * expected_ns)) << self._doublings

    def record_late(self) -> None:
        """The session has left a replica for being late."""
        self._doublings = min(self._doublings + 1, _MOST_DOUBLINGS)
        self._in_time = 0

    def record_in_time(self) -> None:
        """A verdict came in time."""
        self._in_time += 1
        if self._in_time >= _FORGIVEN_AFTER:
            self._doublings = max(0, self._doublings - 1)
            self._in_time = 0

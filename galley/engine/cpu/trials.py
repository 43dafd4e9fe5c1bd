"""Learn which of two ways to run a step is quicker here and now, by using both.

Cores, other processes and the model decide it, and other processes come and go. So the slower way is tried
again, more and more seldom while the result stays the same.
"""

from __future__ import annotations

# A shorter time counts at once, since an interruption only lengthens it; a longer one by this weight.
_WEIGHT = 0.2
# Steps until the slower way is tried again.
_SOONEST, _LATEST = 8, 512


class Trials:
    """The times of two ways, 0 and 1, for one kind of step. Way 1 must be quicker by `margin`."""

    __slots__ = ("_interval", "_margin", "_next", "_ns", "_steps")

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self._ns = [0.0, 0.0]
        self._steps = 0
        self._interval = _SOONEST
        self._next = _SOONEST

    @property
    def better(self) -> int:
        first, second = self._ns
        return int(second * self._margin < first)

    def choose(self) -> int:
        """Return the way of the next step, whose time is then recorded."""
        for way, ns in enumerate(self._ns):
            if ns == 0.0:
                return way
        self._steps += 1
        if self._steps < self._next:
            return self.better
        self._interval = min(2 * self._interval, _LATEST)
        self._next = self._steps + self._interval
        return 1 - self.better

    def record(self, way: int, ns: float) -> None:
        """Record the time of a step, per unit of its work."""
        before, known = self.better, self._ns[way]
        weight = 1.0 if known == 0.0 or ns < known else _WEIGHT
        self._ns[way] = known + weight * (ns - known)
        if self.better != before:
            self._interval = _SOONEST
            self._next = self._steps + _SOONEST

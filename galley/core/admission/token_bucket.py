"""Token buckets of principals, and estimates of when slots come free. Time is an argument, in ns."""

from __future__ import annotations

_SECOND = 1_000_000_000
_LEAST_WAIT_NS = 50_000_000
_MOST_WAIT_NS = 60 * _SECOND
_FIRST_LENGTH_NS = 1 * _SECOND
# Float rounding tolerance, in tokens, so that a caller that waited exactly `retry_after` is admitted.
_ROUNDING = 1e-6
# Weight of the latest stream in the mean length.
_NEWEST = 0.2


class TokenBucket:
    """Fills with `per_s` tokens a second up to `burst`; may be overdrawn.

    A call takes the most that it may use before it begins, and returns the rest. So the rate holds however
    long answers turn out, and a wait that was returned holds too, unless another call came first.
    """

    def __init__(self, per_s: float, burst: float, now: int) -> None:
        self.per_s = per_s
        self.burst = burst
        self._level = burst
        self._at_ns = now
        self._assigned_ns = now

    def try_take(self, tokens: int, now: int) -> int:
        """Take the tokens and return 0; or take none and return how many nanoseconds to wait.

        More than the burst can be taken from a full bucket, and overdraws it. Calls that must wait get
        successive times.
        """
        self._fill(now)
        needed = min(float(tokens), self.burst)
        if self._level >= needed - _ROUNDING:
            self._level -= tokens
            return 0
        ready = now + int((needed - self._level) / self.per_s * _SECOND) + 1
        after_others = self._assigned_ns + int(needed / self.per_s * _SECOND)
        self._assigned_ns = max(ready, min(after_others, now + _MOST_WAIT_NS))
        return max(self._assigned_ns - now, _LEAST_WAIT_NS)

    def is_full(self, now: int) -> bool:
        """Return True if no past use matters any more."""
        self._fill(now)
        return self._level >= self.burst

    def spend(self, tokens: int, now: int) -> None:
        """Take the tokens even if they are not there; a negative number returns some."""
        self._fill(now)
        self._level = min(self.burst, self._level - tokens)

    def _fill(self, now: int) -> None:
        self._level = min(self.burst, self._level + (now - self._at_ns) / _SECOND * self.per_s)
        self._at_ns = now
        if self._level >= self.burst:
            self._assigned_ns = now


class Turnover:
    """Estimates how soon one of `places` slots comes free: by Little's law, stream length over slots.

    Refused callers get successive times, one for each slot that comes free.
    """

    def __init__(self) -> None:
        self._length_ns = 0.0
        self._assigned_ns = 0

    def record_end(self, length_ns: int) -> None:
        """Record the length of a stream that ended."""
        known = self._length_ns or float(length_ns)
        self._length_ns = known + _NEWEST * (length_ns - known)

    def next_wait_ns(self, places: int, now: int) -> int:
        """Return after how many nanoseconds the next refused caller should find a slot."""
        gap = (self._length_ns or _FIRST_LENGTH_NS) / places
        self._assigned_ns = min(max(self._assigned_ns, now) + int(gap), now + _MOST_WAIT_NS)
        return max(self._assigned_ns - now, _LEAST_WAIT_NS)

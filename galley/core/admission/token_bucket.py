"""Tokens that a principal may use over time, and when places come free. Time is an argument (ns)."""

from __future__ import annotations

_SECOND = 1_000_000_000
_LEAST_WAIT_NS = 50_000_000
_MOST_WAIT_NS = 60 * _SECOND
_FIRST_LENGTH_NS = 1 * _SECOND
# Of a token: by how much sums of floats may be off, and not the caller, who came when it was told to.
_ROUNDING = 1e-6
# Of what is known of a stream's length, how much the latest counts.
_NEWEST = 0.2


class TokenBucket:
    """Fills with `per_s` tokens a second up to `burst`; may be overdrawn, and is then in debt.

    A call takes what it may come to before it begins, and gives back what it did not use: so the rate holds
    however long answers turn out, and a wait that was told holds too, unless another call came first.
    """

    def __init__(self, per_s: float, burst: float, now: int) -> None:
        self.per_s = per_s
        self.burst = burst
        self._level = burst
        self._at_ns = now
        self._assigned_ns = now

    def try_take(self, tokens: int, now: int) -> int:
        """Take them and return 0; or take none and return how many nanoseconds to wait.

        What is more than the burst is to be had of a full bucket, and leaves it in debt. Calls that are told
        to wait are told one after the other.
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
        """Nothing was used that would still matter."""
        self._fill(now)
        return self._level >= self.burst

    def spend(self, tokens: int, now: int) -> None:
        """Take them whether or not they are there; a negative number gives back."""
        self._fill(now)
        self._level = min(self.burst, self._level - tokens)

    def _fill(self, now: int) -> None:
        self._level = min(self.burst, self._level + (now - self._at_ns) / _SECOND * self.per_s)
        self._at_ns = now
        if self._level >= self.burst:
            self._assigned_ns = now


class Turnover:
    """How soon one of `places` comes free: by Little's law, as often as their streams' length over them.

    Callers that are sent away are told different times, as many as places will have come free by then.
    """

    def __init__(self) -> None:
        self._length_ns = 0.0
        self._assigned_ns = 0

    def record_end(self, length_ns: int) -> None:
        """A stream has ended after so long."""
        known = self._length_ns or float(length_ns)
        self._length_ns = known + _NEWEST * (length_ns - known)

    def next_wait_ns(self, places: int, now: int) -> int:
        """Nanoseconds after which another of this caller's kind should find a place."""
        gap = (self._length_ns or _FIRST_LENGTH_NS) / places
        self._assigned_ns = min(max(self._assigned_ns, now) + int(gap), now + _MOST_WAIT_NS)
        return max(self._assigned_ns - now, _LEAST_WAIT_NS)

"""A circuit breaker for one replica: after too many failures, pause; then let one probe through.

While closed, everything passes. Once FAILURES of the last WINDOW attempts have failed, it opens, and nothing
passes until its pause is over. Then it is half open: one attempt is the probe, and others wait for its
outcome. A probe that succeeds closes the breaker; one that fails opens it for twice as long.

An outcome is recorded with the number that `begin` returned. It is ignored if the breaker has opened or
closed since.
"""

from __future__ import annotations

import enum
from collections import deque

WINDOW = 8
FAILURES = 4
FIRST_PAUSE_NS = 500_000_000
LONGEST_PAUSE_NS = 8_000_000_000


class State(enum.Enum):
    CLOSED = "everything"
    OPEN = "nothing"
    HALF_OPEN = "one probe"


class Breaker:
    """The breaker of one replica. Times are nanoseconds and never fall."""

    def __init__(self) -> None:
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._open_until: int | None = None
        self._pause = FIRST_PAUSE_NS
        self._probing = False
        self._number = 0

    def state(self, now: int) -> State:
        if self._open_until is None:
            return State.CLOSED
        return State.OPEN if now < self._open_until else State.HALF_OPEN

    def can_begin(self, now: int) -> bool:
        state = self.state(now)
        return state is State.CLOSED or (state is State.HALF_OPEN and not self._probing)

    def begin(self, now: int) -> int:
        """Begin an attempt (the probe if half open); return the number for its outcome, -1 if not allowed."""
        if not self.can_begin(now):
            return -1
        self._probing = self.state(now) is State.HALF_OPEN
        return self._number

    def record_success(self, attempt: int) -> bool:
        """Record a success. Return True if it closed the breaker."""
        if attempt != self._number:
            return False
        self._failed.append(False)
        if not self._probing:
            return False
        self._open_until = None
        self._pause = FIRST_PAUSE_NS
        self._change()
        return True

    def record_failure(self, attempt: int, now: int) -> bool:
        """Record a failure. Return True if it opened the breaker, or keeps it open."""
        if attempt != self._number:
            return False
        self._failed.append(True)
        if not self._probing and sum(self._failed) < FAILURES:
            return False
        self._open_until = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_NS)
        self._change()
        return True

    def record_cancelled(self, attempt: int) -> None:
        """Record that nobody waited for the outcome: another attempt may be the probe."""
        if attempt == self._number:
            self._probing = False

    def _change(self) -> None:
        self._failed.clear()
        self._probing = False
        self._number += 1

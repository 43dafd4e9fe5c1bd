"""The real clock."""

from __future__ import annotations

import time


class MonotonicClock:
    """Nanoseconds of the process's monotonic clock."""

    def now_ns(self) -> int:
        """See `services.core.ports.Clock`."""
        return time.monotonic_ns()

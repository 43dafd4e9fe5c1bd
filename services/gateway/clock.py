"""The real clock."""

from __future__ import annotations

import time


class MonotonicClock:
    """Nanoseconds of the process's monotonic clock: see `galley.core.session.ports.Clock`."""

    now_ns = staticmethod(time.monotonic_ns)

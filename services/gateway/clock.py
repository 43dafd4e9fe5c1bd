"""The clock of the process, for the core's ports."""

from __future__ import annotations

import time

SECOND = 1_000_000_000
"""Nanoseconds."""


class MonotonicClock:
    """A Clock (`galley.core.session.ports`): nanoseconds of the process's monotonic clock."""

    now_ns = staticmethod(time.monotonic_ns)

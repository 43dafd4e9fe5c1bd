"""Format numbers for the dashboard: short, and a dash for unknown values."""

from __future__ import annotations

import math

UNKNOWN = "-"
_TIMES = "×"
_UNITS = (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3))
_MOST_SHARE = 10.0


def number(value: float | None, digits: int = 1) -> str:
    """Format a number as 12.3, 1234 or 12.3k."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for unit, least, size in _UNITS:
        if abs(value) >= least:
            scaled = value / size
            return f"{scaled:.1f}{unit}" if abs(scaled) < 1000 else f"{scaled:.0e}{unit}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """Format a share, 0.5 as 50%; a dash outside [0, 10]."""
    return UNKNOWN if value is None or not 0 <= value <= _MOST_SHARE else f"{value:.0%}"


def times_of(value: float | None) -> str:
    """Format a ratio as 1.82×."""
    written = number(value, 2)
    return written if written == UNKNOWN else written + _TIMES


def duration(seconds: float | None) -> str:
    """Format seconds as 340us, 1.2ms, 62ms, 1.2s or 3m."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds >= 100:
        return f"{number(seconds / 60, 0)}m"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return _short(seconds / size) + unit
    return f"{seconds * 1e6:.0f}us" if seconds > 0 else "0"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"

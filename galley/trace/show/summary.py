"""Format numbers with units."""

from __future__ import annotations

_MS = 1e6


def ms(duration_ns: float) -> str:
    """Format nanoseconds as milliseconds with three digits or thousands separators."""
    value = duration_ns / _MS
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def duration(duration_ns: float) -> str:
    """Format nanoseconds as ms, or as s from one second on."""
    return f"{ms(duration_ns)} ms" if duration_ns < 1e9 else f"{duration_ns / 1e9:,.2f} s"


def count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def percent(part: float, whole: float) -> str:
    """Format part / whole in percent; a dash if `whole` is 0."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else "–"

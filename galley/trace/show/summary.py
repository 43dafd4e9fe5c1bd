"""Format text on one line without control characters, and numbers with units."""

from __future__ import annotations

import re

from galley.common.printable import printable

_MS = 1e6
# Characters that break a line or change the direction of text.
_LAYOUT = re.compile("[\t\n\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def one_line(text: str, longest: int = 80) -> str:
    """Return `text` on one line of at most `longest` characters, cut with an ellipsis."""
    cut = text if len(text) <= longest else text[: longest - 1] + "…"
    return _LAYOUT.sub("\N{REPLACEMENT CHARACTER}", printable(cut))


def ms(duration_ns: float) -> str:
    """Format nanoseconds as milliseconds with three digits or thousands separators."""
    value = duration_ns / _MS
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}"


def duration(duration_ns: float) -> str:
    """Format nanoseconds as ms, or as s from one second on."""
    return f"{ms(duration_ns)} ms" if duration_ns < 1e9 else f"{duration_ns / 1e9:,.2f} s"


def count(number: int, one: str, many: str = "") -> str:
    """Format a number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def percent(part: float, whole: float) -> str:
    """Format part / whole in percent; a dash if `whole` is 0."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else "–"

"""Replace characters that a terminal would interpret: control codes, and those that reorder text."""

from __future__ import annotations

import re

# C0 and C1 control characters except tab and newline, which begin every escape sequence (ECMA-48), and the
# characters with the Unicode property Bidi_Control (UAX #9), which show text in another order than it has.
_INTERPRETED = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\N{ARABIC LETTER MARK}\N{LEFT-TO-RIGHT MARK}\N{RIGHT-TO-LEFT MARK}"
    r"\N{LEFT-TO-RIGHT EMBEDDING}-\N{RIGHT-TO-LEFT OVERRIDE}"
    r"\N{LEFT-TO-RIGHT ISOLATE}-\N{POP DIRECTIONAL ISOLATE}]"
)
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """Return `text`, with its lines and tabs, and U+FFFD for characters that a terminal would interpret."""
    return _INTERPRETED.sub(_REPLACEMENT, text)


def one_line(text: str, longest: int = 80) -> str:
    """Return at most `longest` characters of `text`, without characters that break or reorder a line."""
    cut = text if len(text) <= longest else text[: longest - 1] + "…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else _REPLACEMENT for c in cut)

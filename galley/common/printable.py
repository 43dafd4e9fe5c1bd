"""Replace the control characters of text, which a terminal would interpret."""

from __future__ import annotations

import re

# Control characters except tab and newline.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    return _CONTROL.sub(_REPLACEMENT, text)


def one_line(text: str, longest: int = 80) -> str:
    """Return at most `longest` characters of `text`, without characters that break or reorder a line."""
    cut = text if len(text) <= longest else text[: longest - 1] + "…"
    return cut if cut.isprintable() else "".join(c if c.isprintable() else _REPLACEMENT for c in cut)

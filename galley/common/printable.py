"""Remove what a terminal would obey from text."""

from __future__ import annotations

import re

# What a terminal might obey: all control characters but tab and newline.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` with what a terminal might obey replaced."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)

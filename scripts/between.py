"""Replace what stands between two markers of a page."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def write_between(file: Path, begin: str, end: str, lines: Iterable[str]) -> None:
    """Write the lines between the markers, and a blank line. Raises SystemExit if FILE lacks a marker."""
    text = file.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise SystemExit(f"{file}: must contain the markers of the tables")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    file.write_text(before + begin + "\n".join(lines) + "\n\n" + end + after, encoding="utf-8")

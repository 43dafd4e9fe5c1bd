"""Values of a benchmark's command line."""

from __future__ import annotations


def names(text: str) -> tuple[str, ...]:
    """As "a,b"."""
    return tuple(text.split(","))


def integers(text: str) -> tuple[int, ...]:
    """As "1,2"; ValueError if one is none, which argparse turns into a message."""
    return tuple(int(part) for part in text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    """As "0,0.7"; ValueError if one is none."""
    return tuple(float(part) for part in text.split(","))

"""Amounts as Kubernetes writes them: 512Mi, 1.5, 250m, 25%."""

from __future__ import annotations

import math
import re

_SUFFIXES = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
_FORM = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]*)")


def amount(quantity: str | float) -> float:
    """The number that a quantity stands for; raises ValueError."""
    form = _FORM.fullmatch(str(quantity))
    if form is None or form[2] not in _SUFFIXES:
        raise ValueError(f"{quantity!r} is no quantity")
    return float(form[1]) * _SUFFIXES[form[2]]


def share_of(value: str | int, whole: int, *, up: bool) -> int:
    """A count, or a percentage of `whole` that is rounded up or down (maxSurge, maxUnavailable)."""
    text = str(value)
    if not text.endswith("%"):
        return int(text)
    exact = whole * int(text[:-1]) / 100
    return math.ceil(exact) if up else math.floor(exact)

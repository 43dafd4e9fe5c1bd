"""top_k, top_p and min_p of a row: parts of the kernels of sampling."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from galley.engine.sampling.largest import exponentials
from galley.engine.sampling.layout import Floats, Ids, part

_COARSE: Final = 2048
_STEP: Final = np.float32(32)  # coarse buckets of 1/32, so that the last begins at -64
_DIGIT: Final = 11  # bits; a float32 without its sign has three such digits
_DIGITS: Final = (22, 11, 0)
_MAGNITUDE: Final = np.int32(0x7FFFFFFF)


@part
def apply_filters(scaled: Floats, weights: Floats, columns: int, draw: Any) -> None:
    """Set to -inf what top_k, top_p and min_p of `draw` leave out; only `columns` of `scaled` are tokens.

    `scaled` are logits minus their maximum, over the temperature; `weights` is room of the same length.
    """
    if 0 < draw.top_k < columns:
        weights[:] = 1
        keep_likeliest(scaled, weights, float(draw.top_k))
    if draw.top_p < 1:
        total = exponentials(scaled, np.float32(0), weights)
        keep_likeliest(scaled, weights, draw.top_p * total)
    if draw.min_logit > -np.inf:
        for j in range(columns):
            scaled[j] = -np.inf if scaled[j] < draw.min_logit else scaled[j]


@part
def keep_likeliest(scaled: Floats, weights: Floats, goal: float) -> None:
    """Set to -inf all but the shortest prefix, by (logit descending, id ascending), of weight `goal`.

    None of `scaled` is above 0, so their bits without the sign rise as they fall: one coarse pass, then a
    radix search of the bucket where the prefix ends. Of equals the first stay, at least one.
    """
    masses = np.zeros(_COARSE)
    for j in range(len(scaled)):
        if scaled[j] > -np.inf:
            masses[_bucket(scaled[j])] += weights[j]
    bucket, mass = _walk(masses, goal, 0.0)
    members = np.empty(len(scaled), np.int64)
    count = 0
    for j in range(len(scaled)):
        members[count] = j
        count += _bucket(scaled[j]) == bucket
    last, mass = _last_kept(scaled, weights, members[:count], goal, mass)
    bits, kept = scaled.view(np.int32), 0
    for j in members[:count]:
        if (bits[j] & _MAGNITUDE) == last:
            if kept > 0 and mass >= goal:
                scaled[j] = -np.inf
            mass += weights[j]
            kept += 1
    for j in range(len(scaled)):
        scaled[j] = -np.inf if np.int32(bits[j] & _MAGNITUDE) > last else scaled[j]


@part
def _bucket(logit: np.float32) -> int:
    distance = -logit * _STEP
    return int(distance) if distance < np.float32(_COARSE - 1) else _COARSE - 1


@part
def _walk(masses: NDArray[np.float64], goal: float, mass: float) -> tuple[int, float]:
    """Return where the masses reach `goal`, and the mass before it; else the last with any mass."""
    index, before = 0, mass
    for i in range(len(masses)):
        if masses[i] > 0:
            index, before = i, mass
            mass += masses[i]
            if mass >= goal:
                break
    return index, before


@part
def _last_kept(
    scaled: Floats, weights: Floats, members: Ids, goal: float, mass: float
) -> tuple[np.int32, float]:
    """Return the bits of the value where the prefix ends, digit by digit, and the mass above it."""
    bits, last = scaled.view(np.int32), 0
    masses = np.empty(1 << _DIGIT)
    for shift in _DIGITS:
        masses[:] = 0
        for j in members:
            digits = (bits[j] & _MAGNITUDE) >> shift
            if digits >> _DIGIT == last:
                masses[digits & ((1 << _DIGIT) - 1)] += weights[j]
        digit, mass = _walk(masses, goal, mass)
        last = last << _DIGIT | digit
    return np.int32(last), mass

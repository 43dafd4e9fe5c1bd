"""The largest logits of a row, their exponentials, top_k, top_p and min_p: parts of sampling's kernels."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from galley.engine.sampling.layout import NOTHING, Floats, Ids, part

_CHUNK: Final = 256
_SEGMENT: Final = 2048
_INFINITY: Final = np.int32(0x7F800000)  # the bits of float32
_MAGNITUDE: Final = np.int32(0x7FFFFFFF)
_SIGN: Final = np.int32(31)


@part
def likeliest(row: Floats) -> int:
    """Return the index of the (first) largest of `row`; NOTHING if that is not finite or there is a NaN."""
    highest, start = _highest(row[:_SEGMENT]), 0
    for i in range(_SEGMENT, len(row), _SEGMENT):
        high = _highest(row[i : i + _SEGMENT])
        if high > highest:
            highest, start = high, i
    if highest >= _INFINITY or highest <= ~_INFINITY or _has_nan(row):
        return NOTHING
    end = min(start + _SEGMENT, len(row))
    if highest == 0:
        start = 0  # an equal -0.0 may stand before it
    return start + int(np.argmax(row[start:end]))


@part
def _highest(row: Floats) -> np.int32:
    """Return the largest of `row` as ordered bits: negative numbers have all bits but the sign inverted.

    Unlike a maximum of floats, one of integers is vectorised. Above _INFINITY if it is a NaN.
    """
    bits, highest = row.view(np.int32), ~_MAGNITUDE
    for i in range(len(bits)):
        key = np.int32(bits[i] ^ np.int32(np.int32(bits[i] >> _SIGN) & _MAGNITUDE))
        highest = max(highest, key)
    return highest


@part
def _has_nan(row: Floats) -> bool:
    count = 0
    for i in range(len(row)):
        count += row[i] != row[i]
    return count > 0


@part
def list_first(row: Floats, listed: Ids) -> None:
    """List the first len(listed) tokens by (logit descending, id ascending); len(listed) <= len(row)."""
    if len(listed) == 0:
        return
    for count in range(len(listed)):
        _insert(row, count, listed[: count + 1])
    for start in range(len(listed), len(row), _CHUNK):
        end = min(start + _CHUNK, len(row))
        if any_above(row[start:end], row[listed[-1]]):
            for token in range(start, end):
                if row[token] > row[listed[-1]]:
                    _insert(row, token, listed)


@part
def any_above(logits: Floats, limit: np.float32) -> bool:
    """Return True if any of `logits` is above `limit`; has no branch, so that it is vectorised."""
    count = 0
    for i in range(len(logits)):
        count += logits[i] > limit
    return count > 0


@part
def _insert(row: Floats, token: int, listed: Ids) -> None:
    at = len(listed) - 1
    while at > 0 and row[token] > row[listed[at - 1]]:
        listed[at] = listed[at - 1]
        at -= 1
    listed[at] = token


_LOG2_E: Final = np.float32(1.44269504)
_LN2_HIGH: Final = np.float32(0.693359375)  # few enough bits that a multiple is exact
_LN2_LOW: Final = np.float32(-2.12194440e-4)
_ROUND: Final = np.float32(12582912.0)  # 1.5 * 2**23: adding it leaves no room for a fraction
_LOWEST: Final = np.float32(-87.0)  # e**-87 is negligible beside the largest's 1
_EXP: Final = tuple(
    np.float32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)


@part
def exponentials(logits: Floats, largest: np.float32, weights: Floats) -> float:
    """Write exp(logits - largest), none above 1, to `weights`, exact to 2e-7 each; return their sum.

    Range reduction by multiples of log(2) and a polynomial of degree 7 (Cody and Waite, "Software Manual for
    the Elementary Functions", 1980, chapter 6; the coefficients of Moshier's Cephes, expf).
    """
    sums = np.zeros(16)
    powers = np.empty(_CHUNK, np.int32)
    for start in range(0, len(logits), _CHUNK):
        chunk = logits[start : start + _CHUNK]
        out = weights[start : start + len(chunk)]
        for j in range(len(chunk)):
            x = chunk[j] - largest
            x = max(_LOWEST, x)
            n = (x * _LOG2_E + _ROUND) - _ROUND
            powers[j] = (np.int32(n) + np.int32(127)) << np.int32(23)
            x = x - n * _LN2_HIGH - n * _LN2_LOW
            y = _EXP[0]
            for c in _EXP[1:]:
                y = y * x + c
            out[j] = y * x * x + x + np.float32(1)
        scales = powers.view(np.float32)
        for j in range(len(chunk)):
            out[j] *= scales[j]
        for j in range(0, len(chunk) - 15, 16):
            for lane in range(16):
                sums[lane] += out[j + lane]
        for j in range(len(chunk) // 16 * 16, len(chunk)):
            sums[0] += out[j]
    return float(sums.sum())


_COARSE: Final = 2048
_STEP: Final = np.float32(32)  # coarse buckets of 1/32, so that the last begins at -64
_DIGIT: Final = 11  # bits; a float32 without its sign has three such digits
_DIGITS: Final = (22, 11, 0)


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
    radix search of the bucket where the prefix ends. At least one token stays.
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

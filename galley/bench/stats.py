"""The statistics of a paired comparison: medians and their confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """The median of `count` values, and its 95 % bootstrap interval [low, high]."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def median_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the median and its percentile bootstrap interval (Efron 1979). Raises ValueError if empty."""
    if not values:
        raise ValueError("no values to take a median of")
    given = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(given), (RESAMPLES, len(given)))
    medians = np.median(given[picks], axis=1)  # [resamples]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Interval(float(np.median(given)), float(low), float(high), len(given))


def ratio_interval(ours: Sequence[float], base: Sequence[float], seed: int = 0) -> Interval:
    """Return the median of ours[i] / base[i]; pairs with a base of 0 are left out. Raises ValueError."""
    return median_interval([a / b for a, b in zip(ours, base, strict=True) if b], seed)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated between the nearest two values. Raises ValueError if empty."""
    if not values:
        raise ValueError("no values to take a percentile of")
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent))

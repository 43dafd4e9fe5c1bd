"""The statistics of a paired comparison: medians, and how far they may be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """The median of `count` values, and the bootstrap interval [low, high] in which it lies with 95 %."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def median_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """The median of `values` and its percentile bootstrap interval (Efron 1979). ValueError if none."""
    if not values:
        raise ValueError("no values to take a median of")
    given = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(given), (RESAMPLES, len(given)))
    medians = np.median(given[picks], axis=1)  # [resamples]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Interval(float(np.median(given)), float(low), float(high), len(given))


def ratio_interval(ours: Sequence[float], base: Sequence[float], seed: int = 0) -> Interval:
    """The median of ours[i] / base[i] over the pairs; pairs whose base is 0 say nothing and are left out.

    ValueError unless there are as many of both, and one pair to count.
    """
    return median_interval([a / b for a, b in zip(ours, base, strict=True) if b], seed)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the nearest two; ValueError if there are no values."""
    if not values:
        raise ValueError("no values to take a percentile of")
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent))

"""Compute sums, means and quantiles of scraped samples, and increases between two scrapes. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from galley.common.metrics.metric import Metric

Labels: TypeAlias = "tuple[tuple[str, str], ...]"
# Values by name and sorted labels; finite numbers only.
Samples: TypeAlias = "Mapping[str, Mapping[Labels, float]]"

_BUCKET, _SUM, COUNT = "_bucket", "_sum", "_count"
# Series that only grow, except when a process restarts.
_GROWING = ("_total", _BUCKET, _SUM, COUNT)


def growth(before: Samples, after: Samples) -> Samples:
    """Return the increase of all counters; all of `after` if one fell, because the process restarted."""
    counters = {name: rows for name, rows in after.items() if name.endswith(_GROWING)}
    grown = {
        name: {labels: value - before.get(name, {}).get(labels, 0.0) for labels, value in rows.items()}
        for name, rows in counters.items()
    }
    is_restarted = any(value < 0 for rows in grown.values() for value in rows.values())
    return counters if is_restarted else grown


def added(parts: Iterable[Samples]) -> Samples:
    sums: dict[str, dict[Labels, float]] = {}
    for part in parts:
        for name, rows in part.items():
            into = sums.setdefault(name, {})
            for labels, value in rows.items():
                into[labels] = into.get(labels, 0.0) + value
    return sums


def rows_of(samples: Samples, metric: Metric | str) -> Mapping[Labels, float]:
    """Return the rows of a series, or of a metric that has only one."""
    name = metric if isinstance(metric, str) else metric.series[0]
    return samples.get(name, {})


def total(samples: Samples, metric: Metric | str, **labels: str) -> float | None:
    """Return the sum over all rows with these labels; None if there is no such row."""
    required = set(labels.items())
    found = [value for pairs, value in rows_of(samples, metric).items() if required <= set(pairs)]
    return sum(found) if found else None


def by(samples: Samples, metric: Metric | str, label: str) -> dict[str, float]:
    """Return sums by the value of a label; rows without the label are left out."""
    sums: dict[str, float] = defaultdict(float)
    for labels, value in rows_of(samples, metric).items():
        for key, text in labels:
            if key == label:
                sums[text] += value
    return dict(sums)


def ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole and whole > 0 else None


def mean(samples: Samples, histogram: str, **labels: str) -> float | None:
    return ratio(
        total(samples, histogram + _SUM, **labels),
        total(samples, histogram + COUNT, **labels),
    )


def quantile(samples: Samples, histogram: str, share: float) -> float | None:
    """Return a quantile as Prometheus's histogram_quantile does; None if empty. `share` lies in (0, 1]."""
    counts = _by_bound(samples, histogram)
    bounds = sorted(counts)
    if len(bounds) < 2 or bounds[-1] != math.inf:
        return None
    rank = share * max(counts.values())
    low_bound, low_count = min(0.0, bounds[0]), 0.0
    for bound in bounds[:-1]:
        count = max(counts[bound], low_count)
        if count >= rank and count > low_count:
            return low_bound + (bound - low_bound) * (rank - low_count) / (count - low_count)
        low_bound, low_count = bound, count
    return bounds[-2] if rank > 0 else None


def _by_bound(samples: Samples, histogram: str) -> dict[float, float]:
    counts: dict[float, float] = defaultdict(float)
    for written, count in by(samples, histogram + _BUCKET, "le").items():
        try:
            bound = float(written)
        except ValueError:
            continue
        if bound > -math.inf:  # and not NaN
            counts[bound] += count
    return counts

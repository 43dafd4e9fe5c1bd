"""The metrics of one process: where they are counted, and where they are read from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from galley.common.metrics.catalogue import BUILD
from galley.common.metrics.cells import Bound, Count, Distributed, Distribution, Series
from galley.common.metrics.metric import Kind, Label, LabelValues, Metric
from galley.version import __version__

Observed: TypeAlias = Iterable[tuple[LabelValues, float]]

Point: TypeAlias = "tuple[LabelValues, float | Distributed]"


@dataclass(frozen=True, slots=True)
class Reading:
    """What a metric is now."""

    metric: Metric
    points: Sequence[Point]


class Registry:
    """Of one service. To be read by the thread that counts, or a moment behind it."""

    def __init__(self, service: str) -> None:
        """`service` is as the catalogue names it."""
        self._service = service
        self._readers: dict[Metric, Callable[[], Sequence[Point]]] = {}
        self._bounds: dict[Label, Bound] = {}
        self._settle: list[Callable[[], None]] = []
        self.observe(BUILD, lambda: [((__version__, service), 1)])

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Those that are given here."""
        return tuple(self._readers)

    def count(self, metric: Metric) -> Series[Count]:
        """Where a counter is counted."""
        series = Series(metric, self._bounds_of(metric), Count)
        self._add(metric, lambda: [(values, cell.value) for values, cell in series.cells()])
        return series

    def distribute(self, metric: Metric) -> Series[Distribution]:
        """Where a histogram is."""
        series = Series(metric, self._bounds_of(metric), partial(Distribution, metric.buckets))
        self._add(metric, lambda: [(values, cell.read()) for values, cell in series.cells()])
        return series

    def observe(self, metric: Metric, read: Callable[[], Observed]) -> None:
        """A metric whose numbers are somebody else's, who is asked for them each time."""
        self._add(metric, lambda: _bounded(metric, read()))

    def read(self) -> list[Reading]:
        """All metrics as they are now."""
        for settle in self._settle:
            settle()
        return [Reading(metric, reader()) for metric, reader in self._readers.items()]

    def before_reading(self, settle: Callable[[], None]) -> None:
        """Have `settle` count what it has put off, whenever numbers are read."""
        self._settle.append(settle)

    def bound(self, label: Label) -> Bound:
        """What all counters and histograms of this registry share of a label."""
        return self._bounds.setdefault(label, Bound(label))

    def _bounds_of(self, metric: Metric) -> list[Bound]:
        return [self.bound(label) for label in metric.labels]

    def _add(self, metric: Metric, reader: Callable[[], Sequence[Point]]) -> None:
        """Raises ValueError for a metric that is here already, or another service's."""
        if metric in self._readers or self._service not in metric.services:
            raise ValueError(f"{metric.name} is not to be added to {self._service}")
        self._readers[metric] = reader


def _bounded(metric: Metric, observed: Observed) -> list[Point]:
    """With labels cut to their bounds; counters that fall together are added, of gauges the largest is."""
    bounds = [Bound(label) for label in metric.labels]
    points: dict[LabelValues, float] = {}
    for values, value in observed:
        fitting = tuple(bound.fit(one) for bound, one in zip(bounds, values, strict=True))
        before = points.get(fitting)
        if before is not None:
            value = before + value if metric.kind is Kind.COUNTER else max(before, value)  # noqa: PLW2901
        points[fitting] = value
    return list(points.items())

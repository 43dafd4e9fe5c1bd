"""Registry of the metrics of one process."""

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
    metric: Metric
    points: Sequence[Point]


class Registry:
    """The metrics of one service; read it in the thread that counts."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._readers: dict[Metric, Callable[[], Sequence[Point]]] = {}
        self._bounds: dict[Label, Bound] = {}
        self._flushes: list[Callable[[], None]] = []
        self.observe(BUILD, lambda: [((__version__, service), 1)])

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return tuple(self._readers)

    def count(self, metric: Metric) -> Series[Count]:
        series = Series(metric, self._bounds_of(metric), Count)
        self._add(metric, lambda: [(values, cell.value) for values, cell in series.cells()])
        return series

    def distribute(self, metric: Metric) -> Series[Distribution]:
        series = Series(metric, self._bounds_of(metric), partial(Distribution, metric.buckets))
        self._add(metric, lambda: [(values, cell.read()) for values, cell in series.cells()])
        return series

    def observe(self, metric: Metric, read: Callable[[], Observed]) -> None:
        self._add(metric, lambda: _bounded(metric, read()))

    def read(self) -> list[Reading]:
        for flush in self._flushes:
            flush()
        return [Reading(metric, reader()) for metric, reader in self._readers.items()]

    def before_reading(self, flush: Callable[[], None]) -> None:
        self._flushes.append(flush)

    def bound(self, label: Label) -> Bound:
        """Return the bound of a label, shared by all counters and histograms."""
        return self._bounds.setdefault(label, Bound(label))

    def _bounds_of(self, metric: Metric) -> list[Bound]:
        return [self.bound(label) for label in metric.labels]

    def _add(self, metric: Metric, reader: Callable[[], Sequence[Point]]) -> None:
        """Raise ValueError for a metric that is registered already, or another service's."""
        if metric in self._readers or self._service not in metric.services:
            raise ValueError(f"{metric.name}: must be a metric of {self._service} that is not registered yet")
        self._readers[metric] = reader


def _bounded(metric: Metric, observed: Observed) -> list[Point]:
    """Bound the labels; add up counters with equal labels, and keep the largest of such gauges."""
    bounds = [Bound(label) for label in metric.labels]
    points: dict[LabelValues, float] = {}
    for values, value in observed:
        fitting = tuple(bound.fit(one) for bound, one in zip(bounds, values, strict=True))
        before = points.get(fitting)
        if before is not None:
            value = before + value if metric.kind is Kind.COUNTER else max(before, value)  # noqa: PLW2901
        points[fitting] = value
    return list(points.items())

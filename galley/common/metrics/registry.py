"""Registry of the metrics of one process: cells are plain numbers that are looked up once by their labels.

One thread writes a number. Others may read it and get a slightly older value.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from opentelemetry.trace import SpanContext

from galley.common.metrics.catalogue import BUILD
from galley.common.metrics.metric import OTHER, Kind, Label, LabelValues, Metric
from galley.common.metrics.process import observe_process
from galley.version import __version__

SpanRef: TypeAlias = tuple[int, int]
Observed: TypeAlias = Iterable[tuple[LabelValues, float]]
Point: TypeAlias = "tuple[LabelValues, float | Distributed]"


def span_ref(span: SpanContext) -> SpanRef | None:
    """Return the ids for an exemplar; None if the span is not sampled."""
    return (span.trace_id, span.span_id) if span.is_valid and span.trace_flags.sampled else None


class Count:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One observation with its span; `at_s` is Unix time."""

    value: float
    span: SpanRef
    at_s: float


@dataclass(frozen=True, slots=True)
class Distributed:
    """A histogram's values: `counts[i]` in (bounds[i - 1], bounds[i]], the last above; `total` is the sum."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float
    exemplars: Mapping[int, Exemplar]


class Distribution:
    """A histogram; the last observation with a span is its bucket's exemplar."""

    __slots__ = ("_bounds", "_counts", "_exemplars", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float, span: SpanRef | None = None, at_s: float = 0.0) -> None:
        """Count `value`; `span` is its exemplar. `at_s` is the Unix time of the observation, 0 for now."""
        index = bisect_left(self._bounds, value)
        self._counts[index] += 1
        self._total += value
        if span is not None:
            self._exemplars[index] = Exemplar(value, span, at_s or time.time())

    def read(self) -> Distributed:
        return Distributed(self._bounds, tuple(self._counts), self._total, dict(self._exemplars))


class Bound:
    """The bound of the values of one label; an open label keeps the first ones, or the latest."""

    def __init__(self, label: Label) -> None:
        self.on_dropped: list[Callable[[str], None]] = []
        """Called with a value that gave way to a later one."""
        self._label = label
        self._seen: dict[str, None] = {}

    def fit(self, value: str) -> str:
        """Return the value or OTHER. Raise ValueError if neither is a value of the label."""
        if not self._label.values:
            return self._of_open(value)
        if value in self._label.values:
            return value
        if OTHER in self._label.values:
            return OTHER
        raise ValueError(f"{self._label.name}: must be one of {', '.join(self._label.values)}, got {value!r}")

    def _of_open(self, value: str) -> str:
        if self._label.keeps_latest:
            self._seen.pop(value, None)
        elif value in self._seen:
            return value
        if len(self._seen) >= self._label.most:
            if not self._label.keeps_latest:
                return OTHER
            self._drop(next(iter(self._seen)))
        self._seen[value] = None
        return value

    def _drop(self, value: str) -> None:
        del self._seen[value]
        for dropped in self.on_dropped:
            dropped(value)


CellT = TypeVar("CellT", Count, Distribution)


class Series(Generic[CellT]):
    def __init__(self, metric: Metric, bounds: Sequence[Bound], new_cell: Callable[[], CellT]) -> None:
        self._bounds = bounds
        self._new_cell: Callable[[], CellT] = new_cell
        self._cells: dict[LabelValues, CellT] = {}
        for place, bound in enumerate(bounds):
            bound.on_dropped.append(partial(self._end, place))
        for values in metric.at_start:
            self.at(*values)

    def at(self, *values: str) -> CellT:
        fitting = tuple(bound.fit(value) for bound, value in zip(self._bounds, values, strict=True))
        cell = self._cells.get(fitting)
        if cell is None:
            cell = self._cells[fitting] = self._new_cell()
        return cell

    def cells(self) -> tuple[tuple[LabelValues, CellT], ...]:
        return tuple(self._cells.items())

    def _end(self, place: int, value: str) -> None:
        """End the series whose label at `place` has this value."""
        for values in [values for values in self._cells if values[place] == value]:
            del self._cells[values]


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
        observe_process(self.observe)

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

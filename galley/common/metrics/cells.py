"""Cells: plain numbers that are looked up once by their labels.

One thread writes a number. Others may read it and get a slightly older value.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from opentelemetry.trace import SpanContext

from galley.common.metrics.metric import OTHER, Label, LabelValues, Metric

SpanRef: TypeAlias = tuple[int, int]


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
    """A histogram's values: `counts[i]` observations up to `bounds[i]`, the last count above all bounds."""

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
        """`at_s` is the Unix time of the observation, 0 for now."""
        index = bisect_left(self._bounds, value)
        self._counts[index] += 1
        self._total += value
        if span is not None:
            self._exemplars[index] = Exemplar(value, span, at_s or time.time())

    def read(self) -> Distributed:
        return Distributed(self._bounds, tuple(self._counts), self._total, dict(self._exemplars))


class Bound:
    """Bounds the values of one label; an open label keeps the first ones."""

    def __init__(self, label: Label) -> None:
        self._label = label
        self._seen: set[str] = set()

    def fit(self, value: str) -> str:
        """Return the value or OTHER. Raise ValueError if neither is a value of the label."""
        if not self._label.values:
            return self._of_open(value)
        if value in self._label.values:
            return value
        if OTHER in self._label.values:
            return OTHER
        raise ValueError(f"{self._label.name}: {value!r} is none of {', '.join(self._label.values)}")

    def _of_open(self, value: str) -> str:
        if value in self._seen:
            return value
        if len(self._seen) >= self._label.most:
            return OTHER
        self._seen.add(value)
        return value


CellT = TypeVar("CellT", Count, Distribution)


class Series(Generic[CellT]):
    def __init__(self, metric: Metric, bounds: Sequence[Bound], new_cell: Callable[[], CellT]) -> None:
        self._bounds = bounds
        self._new_cell: Callable[[], CellT] = new_cell
        self._cells: dict[LabelValues, CellT] = {}
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

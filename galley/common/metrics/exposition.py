"""Metrics as Prometheus reads them: its own text, or OpenMetrics with exemplars where that is asked for.

The library's writers make every name and label anew at each scrape, which costs ten times as much; a test
compares what they write with this, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.utils import floatToGoString

from galley.common.metrics.cells import Distributed, Exemplar
from galley.common.metrics.metric import Kind, LabelValues, Metric
from galley.common.metrics.registry import Point, Reading

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_Samples: TypeAlias = "tuple[str, ...]"
"""What stands before each number of a series: a name and labels."""
_SHORT = 10**6
"""Whole numbers below are written without an exponent."""


class Exposition:
    """Writes readings, time and again; what stands before a number is made when it is first seen."""

    def __init__(self) -> None:
        self._families: dict[tuple[str, bool], _Family] = {}

    def render(self, readings: Sequence[Reading], accept: str) -> tuple[bytes, str]:
        """The body and its content type, as the Accept header asks."""
        is_open = _wants_open_metrics(accept)
        text = [self._family(reading.metric, is_open).text(reading.points) for reading in readings]
        if is_open:
            text.append("# EOF\n")
        return "".join(text).encode(), OPEN_METRICS if is_open else TEXT

    def _family(self, metric: Metric, is_open: bool) -> _Family:
        family = self._families.get((metric.name, is_open))
        if family is None:
            family = self._families[metric.name, is_open] = _Family(metric, is_open)
        return family


def _wants_open_metrics(accept: str) -> bool:
    return any(kind.split(";")[0].strip() == "application/openmetrics-text" for kind in accept.split(","))


class _Family:
    """One metric in one of the two forms."""

    def __init__(self, metric: Metric, is_open: bool) -> None:
        self._metric = metric
        self._is_open = is_open
        self._head = _head(metric, is_open)
        # Of those that were there when it was last written.
        self._series: dict[LabelValues, _Samples] = {}

    def text(self, points: Sequence[Point]) -> str:
        """All lines of it."""
        known = self._series
        self._series = {values: known.get(values) or _samples(self._metric, values) for values, _ in points}
        lines = [self._head]
        for values, value in points:
            samples = self._series[values]
            if isinstance(value, Distributed):
                lines += self._histogram(samples, value)
            else:
                lines.append(f"{samples[0]}{_number(value)}\n")
        return "".join(lines)

    def _histogram(self, samples: _Samples, read: Distributed) -> Iterator[str]:
        below = list(accumulate(read.counts))
        if self._is_open and read.exemplars:
            for index, (sample, count) in enumerate(zip(samples, below, strict=False)):
                exemplar = read.exemplars.get(index)
                yield f"{sample}{_number(count)}{'' if exemplar is None else _named(exemplar)}\n"
        else:
            yield from [f"{sample}{_number(count)}\n" for sample, count in zip(samples, below, strict=False)]
        yield f"{samples[-2]}{_number(below[-1])}\n"
        yield f"{samples[-1]}{_number(read.total)}\n"


def _head(metric: Metric, is_open: bool) -> str:
    name, kind = metric.prometheus, metric.kind.value
    about = _escaped(metric.description) if is_open else metric.description.replace("\\", r"\\")
    if not is_open and metric.kind is not Kind.HISTOGRAM:
        name, kind = metric.series[0], "gauge" if metric.kind is Kind.INFO else kind
    lines = [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
    if is_open and metric.prometheus_unit:
        lines.append(f"# UNIT {name} {metric.prometheus_unit}")
    return "\n".join([*lines, ""])


def _samples(metric: Metric, values: LabelValues) -> _Samples:
    labels = {label.prometheus: value for label, value in zip(metric.labels, values, strict=True)}
    if metric.kind is not Kind.HISTOGRAM:
        return (_sample(metric.series[0], labels),)
    bucket, total, count = metric.series
    buckets = (_sample(bucket, {**labels, "le": bound}) for bound in (*map(str, metric.buckets), "+Inf"))
    return (*buckets, _sample(count, labels), _sample(total, labels))


def _sample(name: str, labels: dict[str, str]) -> str:
    told = ",".join(f'{label}="{_escaped(value)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{told}}} " if told else f"{name} "


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if type(value) is int and 0 <= value < _SHORT:
        return f"{value}.0"
    written: str = floatToGoString(value)  # type: ignore[no-untyped-call]  # is untyped
    return written


def _named(exemplar: Exemplar) -> str:
    trace_id, span_id = exemplar.span
    labels = f'{{span_id="{span_id:016x}",trace_id="{trace_id:032x}"}}'
    return f" # {labels} {_number(exemplar.value)} {exemplar.at_s}"

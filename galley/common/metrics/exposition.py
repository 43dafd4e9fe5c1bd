"""Metrics as Prometheus reads them: its text, or OpenMetrics with exemplars if a scrape accepts it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain

from prometheus_client import exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as NamedExemplar

from galley.common.metrics.cells import Distributed, Exemplar
from galley.common.metrics.metric import Kind, LabelValues
from galley.common.metrics.registry import Reading

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def render(readings: Sequence[Reading], accept: str) -> tuple[bytes, str]:
    """Return the body and its content type, as the Accept header asks."""
    collected, plain = _Collected(readings), openmetrics_exposition.ALLOWUTF8
    if not any(kind.split(";")[0].strip() == "application/openmetrics-text" for kind in accept.split(",")):
        return exposition.generate_latest(collected, plain), TEXT
    return openmetrics_exposition.generate_latest(collected, plain), OPEN_METRICS  # type: ignore[no-untyped-call]


class _Collected(Collector):
    """Readings as the library collects them."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._readings = readings

    def collect(self) -> Iterable[Family]:
        """Return one family for each metric."""
        return map(_family, self._readings)


def _family(reading: Reading) -> Family:
    metric = reading.metric
    about = metric.prometheus, metric.description
    labels = [label.prometheus for label in metric.labels]
    match metric.kind:
        case Kind.COUNTER:
            counter = CounterMetricFamily(*about, labels=labels, unit=metric.prometheus_unit)
            for values, value in _numbers(reading):
                counter.add_metric(values, value)
            return counter
        case Kind.GAUGE:
            gauge = GaugeMetricFamily(*about, labels=labels, unit=metric.prometheus_unit)
            for values, value in _numbers(reading):
                gauge.add_metric(values, value)
            return gauge
        case Kind.INFO:
            info = InfoMetricFamily(*about)
            for values, _ in reading.points:
                info.add_metric((), dict(zip(labels, values, strict=True)))
            return info
        case Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(*about, labels=labels, unit=metric.prometheus_unit)
            for values, read in reading.points:
                if isinstance(read, Distributed):
                    histogram.add_metric(values, list(_buckets(read)), read.total)
            return histogram


def _numbers(reading: Reading) -> Iterator[tuple[LabelValues, float]]:
    for values, value in reading.points:
        if not isinstance(value, Distributed):
            yield values, value


def _buckets(read: Distributed) -> Iterator[tuple[str, float] | tuple[str, float, NamedExemplar]]:
    names = chain(map(str, read.bounds), ["+Inf"])
    for index, (name, below) in enumerate(zip(names, accumulate(read.counts), strict=True)):
        exemplar = read.exemplars.get(index)
        yield (name, below) if exemplar is None else (name, below, _named(exemplar))


def _named(exemplar: Exemplar) -> NamedExemplar:
    trace_id, span_id = exemplar.span
    labels = {"trace_id": f"{trace_id:032x}", "span_id": f"{span_id:016x}"}
    return NamedExemplar(labels, exemplar.value, exemplar.at_s)

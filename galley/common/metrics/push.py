"""OTLP push of metrics, each minute or each OTEL_METRIC_EXPORT_INTERVAL (ms).

Values are read in the event loop and sent by the SDK's exporter in a thread, so that a slow or unreachable
collector does not block the loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from galley.common.metrics.metric import Kind, LabelValues, Metric
from galley.common.metrics.registry import Distributed, Exemplar, Reading, Registry
from galley.common.tracing.exporting import ReloadingExporter, http_session, resource_of
from galley.common.tracing.otlp import FLUSH_S, is_http
from galley.version import __version__

_INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
_INTERVAL_MS = 60_000.0
_LOG = logging.getLogger(__name__)
_CUMULATIVE = sdk.AggregationTemporality.CUMULATIVE
# Optional on the wire, though the SDK's own histograms always have them.
_NOT_KEPT: Any = None


class _GrpcExporter(ReloadingExporter, OTLPMetricExporter):
    signal = "metrics"


def _exporter() -> sdk.MetricExporter:
    """Return the SDK's exporter for the protocol of the environment. Raise ValueError as `Pusher` does."""
    if not is_http("metrics"):
        return _GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http import metric_exporter  # noqa: PLC0415  # imports requests

    return metric_exporter.OTLPMetricExporter(session=http_session("metrics"))


class Pusher:
    def __init__(self, registry: Registry, service_name: str) -> None:
        """Read the collector from the environment. Raise ValueError if a variable is unusable."""
        self._registry = registry
        self._resource = resource_of(service_name)
        self._exporter = _exporter()
        self._interval_s = _interval_ms() / 1000
        self._began_ns = time.time_ns()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start pushing; call in the event loop that counts."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._try_to_push()
        await _in_daemon(self._exporter.shutdown)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._try_to_push()

    async def _try_to_push(self) -> None:
        """Push; log errors, which must not end the pushing or the service."""
        try:
            await self._push()
        except Exception:  # noqa: BLE001  # the service must go on
            _LOG.exception("metrics could not be pushed")

    async def _push(self) -> None:
        data = as_otlp(self._registry.read(), self._resource, self._began_ns, time.time_ns())
        await _in_daemon(lambda: self._exporter.export(data))


async def _in_daemon(work: Callable[[], object]) -> None:
    """Run `work` in a daemon thread and wait for it; the exporter logs its errors."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="metrics-push", daemon=True).start()
    await done.wait()


def as_otlp(readings: list[Reading], resource: Resource, began_ns: int, now_ns: int) -> sdk.MetricsData:
    """Return the readings as the SDK's data; times are Unix nanoseconds."""
    metrics = [_metric(reading, began_ns, now_ns) for reading in readings]
    scope = InstrumentationScope("galley", __version__)
    return sdk.MetricsData([sdk.ResourceMetrics(resource, [sdk.ScopeMetrics(scope, metrics, "")], "")])


def _metric(reading: Reading, began_ns: int, now_ns: int) -> sdk.Metric:
    metric = reading.metric
    if metric.kind is Kind.HISTOGRAM:
        data = sdk.Histogram(
            [
                _histogram(_attributes(metric, values), value, began_ns, now_ns)
                for values, value in reading.points
                if isinstance(value, Distributed)
            ],
            _CUMULATIVE,
        )
        return sdk.Metric(metric.name, metric.description, metric.unit, data)
    numbers = [
        sdk.NumberDataPoint(_attributes(metric, values), began_ns, now_ns, value)
        for values, value in reading.points
        if not isinstance(value, Distributed)
    ]
    is_counter = metric.kind is Kind.COUNTER
    total = sdk.Sum(numbers, _CUMULATIVE, is_monotonic=True) if is_counter else sdk.Gauge(numbers)
    # A translator to Prometheus adds _total to sums, and nothing to gauges.
    name = f"{metric.name}.info" if metric.kind is Kind.INFO else metric.name
    return sdk.Metric(name, metric.description, metric.unit, total)


def _histogram(
    attributes: dict[str, str], read: Distributed, began_ns: int, now_ns: int
) -> sdk.HistogramDataPoint:
    return sdk.HistogramDataPoint(
        attributes=attributes,
        start_time_unix_nano=began_ns,
        time_unix_nano=now_ns,
        count=sum(read.counts),
        sum=read.total,
        bucket_counts=read.counts,
        explicit_bounds=read.bounds,
        min=_NOT_KEPT,
        max=_NOT_KEPT,
        exemplars=[_exemplar(exemplar) for exemplar in read.exemplars.values()],
    )


def _attributes(metric: Metric, values: LabelValues) -> dict[str, str]:
    """Leave out empty labels, as in Prometheus."""
    return {label.name: value for label, value in zip(metric.labels, values, strict=True) if value}


def _exemplar(exemplar: Exemplar) -> SdkExemplar:
    trace_id, span_id = exemplar.span
    return SdkExemplar({}, exemplar.value, int(exemplar.at_s * 1e9), span_id=span_id, trace_id=trace_id)


def _interval_ms() -> float:
    value = os.environ.get(_INTERVAL, "")
    interval_ms = float(value) if value else _INTERVAL_MS
    if not interval_ms > 0:
        raise ValueError(f"{_INTERVAL}: must be > 0, got {value}")
    return interval_ms

"""Metrics leave the process by OTLP, and a collector that is away holds up nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from galley.common.config.settings import OFF
from galley.common.metrics import catalogue
from galley.common.metrics.metering import Metering, flush_telemetry, start_metering
from galley.common.tracing.telemetry import start_telemetry
from galley.version import __version__
from tests.fakes.otlp_collector import METRICS, TRACES, collecting

PATIENCE_S = 20.0
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")


class Collector:
    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.came = threading.Semaphore(0)

    def take(self, _signal: str, request: Any, _context: Any) -> None:
        self.requests.append(request)
        self.came.release()


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENDPOINTS, "OTEL_SDK_DISABLED", "OTEL_METRICS_EXPORTER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector(_clean: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    collector = Collector()
    with collecting(collector.take) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://{address}")
        yield collector


async def pushing() -> Metering:
    return await start_metering("gateway", "127.0.0.1", OFF)


async def test_the_last_numbers_are_sent_at_the_end(collector: Collector) -> None:
    metering = await pushing()
    assert metering.registry is not None
    metering.registry.count(catalogue.OVERLAPS).at("hit").value += 3
    metering.registry.distribute(catalogue.ROUND_DURATION).at().observe(0.012, (0xABC, 0xDEF))
    metering.registry.observe(catalogue.SESSIONS_OPEN, lambda: [((), 7)])
    await metering.close()
    await metering.close()

    [request] = collector.requests
    [resource] = request.resource_metrics
    about = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
    assert about["service.name"] == "galley-gateway"
    assert about["service.namespace"] == "galley"
    assert about["service.version"] == __version__
    assert about["service.instance.id"]
    [scope] = resource.scope_metrics
    metrics = {metric.name: metric for metric in scope.metrics}

    overlap = metrics["galley.overlap"].sum
    assert overlap.is_monotonic
    assert {point.attributes[0].value.string_value: point.as_int for point in overlap.data_points} == {
        "hit": 3,
        "miss": 0,
    }
    assert metrics["galley.sessions.open"].gauge.data_points[0].as_int == 7
    assert metrics["galley.build.info"].gauge.data_points[0].as_int == 1, "galley_build_info in Prometheus"
    round_duration = metrics["galley.round.duration"]
    assert round_duration.unit == "s"
    [point] = round_duration.histogram.data_points
    assert (point.count, point.sum) == (1, 0.012)
    assert tuple(point.explicit_bounds) == catalogue.ROUND_DURATION.buckets
    assert sum(point.bucket_counts) == 1
    assert not point.HasField("min")
    [exemplar] = point.exemplars
    assert int.from_bytes(exemplar.trace_id, "big") == 0xABC
    assert int.from_bytes(exemplar.span_id, "big") == 0xDEF


async def test_they_are_sent_as_often_as_told(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    metering = await pushing()
    for _ in range(2):
        assert await asyncio.to_thread(collector.came.acquire, timeout=PATIENCE_S)
    await metering.close()


@pytest.mark.parametrize("reported", ["0", "-1", "nan"])
async def test_an_interval_that_is_none_is_refused(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, reported: str
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", reported)
    with pytest.raises(ValueError, match="OTEL_METRIC_EXPORT_INTERVAL: must be > 0"):
        await pushing()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_METRICS_EXPORTER", "none"),
        ("OTEL_SDK_DISABLED", "true"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json"),
    ],
)
async def test_it_can_be_switched_off(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert (await pushing()).registry is None
    assert not collector.requests


async def test_a_collector_that_is_away_holds_up_no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("galley.common.metrics.push.FLUSH_S", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    metering = await pushing()
    async with asyncio.timeout(PATIENCE_S / 4):
        await metering.close()


async def test_a_process_flushes_traces_and_metrics_at_the_same_time_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both, exported = threading.Barrier(2, timeout=PATIENCE_S), []

    def take(signal: str, _request: Any, context: Any) -> None:
        both.wait()
        if context.is_active():
            exported.append(signal)

    with collecting(take) as address:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{address}")
        telemetry = start_telemetry("galley-test", as_global=False)
        metering = await pushing()
        telemetry.tracer("test").start_span("last").end()
        for _ in range(2):
            await flush_telemetry(telemetry, metering)
    assert sorted(exported) == [METRICS, TRACES]

"""At a process's end traces and metrics go to the collector together: neither takes the other's time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_rpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as traces_rpc

from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.metering import OFF, start_metering
from galley.common.server.lifecycle import flush_telemetry
from galley.common.tracing.telemetry import start_telemetry

PATIENCE_S = 20.0


class Slow:
    """Takes nothing before it has been asked to take both; `heard` are those who had not given up by then."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._both = threading.Barrier(2, timeout=PATIENCE_S)

    def take(self, what: str, context: grpc.ServicerContext) -> None:
        self._both.wait()
        if context.is_active():
            self.heard.append(what)


class Traces(traces_rpc.TraceServiceServicer):
    def __init__(self, slow: Slow) -> None:
        self._slow = slow

    def Export(self, request: Any, context: Any) -> Any:
        self._slow.take("traces", context)
        return traces.ExportTraceServiceResponse()


class Metrics(metrics_rpc.MetricsServiceServicer):
    def __init__(self, slow: Slow) -> None:
        self._slow = slow

    def Export(self, request: Any, context: Any) -> Any:
        self._slow.take("metrics", context)
        return metrics.ExportMetricsServiceResponse()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """A collector, named by the environment."""
    slow = Slow()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    traces_rpc.add_TraceServiceServicer_to_server(Traces(slow), server)  # type: ignore[no-untyped-call]  # untyped
    metrics_rpc.add_MetricsServiceServicer_to_server(Metrics(slow), server)  # type: ignore[no-untyped-call]  # untyped
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    yield slow
    server.stop(None).wait()


async def test_both_are_sent_at_the_same_time_and_once(slow: Slow) -> None:
    telemetry = start_telemetry("galley-test", as_global=False)
    metering = await start_metering(GATEWAY, "127.0.0.1", OFF)
    telemetry.tracer("test").start_span("the last").end()
    for _ in range(2):
        await flush_telemetry(telemetry, metering)
    assert sorted(slow.heard) == ["metrics", "traces"]

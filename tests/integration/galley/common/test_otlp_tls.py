"""Traces and metrics go to a collector over mutual TLS, by files that are replaced meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_rpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as traces
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as traces_rpc

from galley.common.metrics.metering import OFF, start_metering
from galley.common.tracing.telemetry import Telemetry, start_telemetry
from tests.fakes.certificates import Authority, Mounted, caller_of, mounted
from tests.fakes.redis_clusters import free_port


class Heard:
    """Who has exported what, by the name in the certificate."""

    def __init__(self) -> None:
        self.exports: list[tuple[str, str]] = []

    def note(self, signal: str, context: Any) -> None:
        self.exports.append((signal, caller_of(context)))


class Traces(traces_rpc.TraceServiceServicer):
    def __init__(self, heard: Heard) -> None:
        self._heard = heard

    def Export(self, request: Any, context: Any) -> Any:
        self._heard.note("traces", context)
        return traces.ExportTraceServiceResponse()


class Metrics(metrics_rpc.MetricsServiceServicer):
    def __init__(self, heard: Heard) -> None:
        self._heard = heard

    def Export(self, request: Any, context: Any) -> Any:
        self._heard.note("metrics", context)
        return metrics.ExportMetricsServiceResponse()


@contextmanager
def collecting(port: int, authority: Authority, heard: Heard) -> Iterator[None]:
    """A collector that has a certificate of `authority`, and asks for one of it."""
    pair = authority.issue("collector")
    credentials = grpc.ssl_server_credentials(
        [(pair.key.read_bytes(), pair.cert.read_bytes())],
        authority.ca.read_bytes(),
        require_client_auth=True,
    )
    server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    traces_rpc.add_TraceServiceServicer_to_server(Traces(heard), server)  # type: ignore[no-untyped-call]  # untyped
    metrics_rpc.add_MetricsServiceServicer_to_server(Metrics(heard), server)  # type: ignore[no-untyped-call]  # untyped
    assert server.add_secure_port(f"127.0.0.1:{port}", credentials) == port
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("OTEL_SDK_DISABLED", "OTEL_METRICS_EXPORTER", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def name_files(environment: pytest.MonkeyPatch, files: Mounted) -> None:
    """The key by the name of one signal, as it may be said too."""
    environment.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", files.ca)
    environment.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", files.cert)
    environment.setenv("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", files.key)
    environment.setenv("OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY", files.key)


def send_span(telemetry: Telemetry) -> None:
    assert telemetry.processor is not None
    telemetry.tracer("test").start_span("span").end()
    telemetry.processor.force_flush()


async def test_files_are_read_anew_where_a_connection_has_to_be_made(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    """The collector is another, of another authority: neither trusts what the other showed before."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    files = mounted(tmp_path / "files", old.ca, old.issue("before"))
    port, heard = free_port(), Heard()
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"https://127.0.0.1:{port}")
    name_files(environment, files)
    telemetry = start_telemetry("galley-test", as_global=False)
    with collecting(port, old, heard):
        send_span(telemetry)
    with collecting(port, new, heard):
        files.put_pair(new.ca, new.issue("after"))
        send_span(telemetry)
    telemetry.shutdown()
    assert heard.exports == [("traces", "before"), ("traces", "after")]


async def test_metrics_go_the_same_way(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path, "authority")
    files = mounted(tmp_path / "files", authority.ca, authority.issue("pusher"))
    port, heard = free_port(), Heard()
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"https://127.0.0.1:{port}")
    name_files(environment, files)
    with collecting(port, authority, heard):
        metering = await start_metering("gateway", "127.0.0.1", OFF)
        await metering.close()
    assert heard.exports == [("metrics", "pusher")]


async def test_a_file_of_no_use_is_told_at_once_with_its_variable(environment: pytest.MonkeyPatch) -> None:
    """And does not have the public authorities trusted in its place."""
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://127.0.0.1:1")
    environment.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_CERTIFICATE: /nowhere: No such file"):
        await start_metering("gateway", "127.0.0.1", OFF)
    environment.setenv("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "/elsewhere")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE: /elsewhere: No such file"):
        start_telemetry("galley-test", as_global=False)


async def test_a_collector_without_tls_needs_no_files(environment: pytest.MonkeyPatch) -> None:
    """A platform may name them for all of its pods, whichever have them."""
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    environment.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere")
    metering = await start_metering("gateway", "127.0.0.1", OFF)
    await metering.close()

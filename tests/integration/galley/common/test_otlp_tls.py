"""Traces and metrics go to a collector over mutual TLS, by files that are replaced meanwhile."""

from __future__ import annotations

import ssl
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest

from galley.common.config.settings import OFF
from galley.common.metrics.metering import start_metering
from galley.common.tracing.telemetry import Telemetry, start_telemetry
from galley.stack.ports import free_ports
from tests.fakes.certificates import Authority, Mounted, caller_of, mounted
from tests.fakes.otlp_collector import collecting
from tests.fakes.otlp_http import collecting_http


class Exports:
    def __init__(self) -> None:
        self.received: list[tuple[str, str]] = []

    def collecting(self, port: int, authority: Authority) -> AbstractContextManager[str]:
        pair = authority.issue("collector")
        credentials = grpc.ssl_server_credentials(
            [(pair.key.read_bytes(), pair.cert.read_bytes())],
            authority.ca.read_bytes(),
            require_client_auth=True,
        )
        return collecting(self._take, port, credentials)

    def collecting_http(self, port: int, authority: Authority) -> AbstractContextManager[str]:
        pair = authority.issue("collector")
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.ca))
        tls.load_cert_chain(pair.cert, pair.key)
        tls.verify_mode = ssl.CERT_REQUIRED
        return collecting_http(self._take_http, port, tls)

    def _take(self, signal: str, _request: Any, context: Any) -> None:
        self.received.append((signal, caller_of(context)))

    def _take_http(self, signal: str, _request: Any, handler: Any) -> None:
        [[(_, name)]] = handler.connection.getpeercert()["subject"]
        self.received.append((signal, name))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("OTEL_SDK_DISABLED", "OTEL_METRICS_EXPORTER", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def name_files(environment: pytest.MonkeyPatch, files: Mounted) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", files.ca)
    environment.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", files.cert)
    environment.setenv("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", files.key)
    environment.setenv("OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY", files.key)


def send_span(telemetry: Telemetry) -> None:
    assert telemetry.processor is not None
    telemetry.tracer("test").start_span("span").end()
    telemetry.processor.force_flush()


async def test_files_are_read_again_for_each_new_connection(
    tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    files = mounted(tmp_path / "files", old.ca, old.issue("before"))
    port, exports = free_ports(1)[0], Exports()
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"https://127.0.0.1:{port}")
    name_files(environment, files)
    telemetry = start_telemetry("galley-test", as_global=False)
    with exports.collecting(port, old):
        send_span(telemetry)
    with exports.collecting(port, new):
        files.put_pair(new.ca, new.issue("after"))
        send_span(telemetry)
    telemetry.shutdown()
    assert exports.received == [("traces", "before"), ("traces", "after")]


async def test_http_reads_the_files_again_too(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    files = mounted(tmp_path / "files", old.ca, old.issue("before"))
    port, exports = free_ports(1)[0], Exports()
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"https://127.0.0.1:{port}")
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    environment.setenv("REQUESTS_CA_BUNDLE", str(new.ca))
    name_files(environment, files)
    telemetry = start_telemetry("galley-test", as_global=False)
    with exports.collecting_http(port, old):
        send_span(telemetry)
    with exports.collecting_http(port, new):
        files.put_pair(new.ca, new.issue("after"))
        send_span(telemetry)
        metering = await start_metering("gateway", "127.0.0.1", OFF)
        await metering.close()
    telemetry.shutdown()
    assert exports.received == [("traces", "before"), ("traces", "after"), ("metrics", "after")]


async def test_metrics_go_the_same_way(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path, "authority")
    files = mounted(tmp_path / "files", authority.ca, authority.issue("pusher"))
    port, exports = free_ports(1)[0], Exports()
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"https://127.0.0.1:{port}")
    name_files(environment, files)
    with exports.collecting(port, authority):
        metering = await start_metering("gateway", "127.0.0.1", OFF)
        await metering.close()
    assert exports.received == [("metrics", "pusher")]


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_unusable_file_is_reported_at_once_with_its_variable(
    environment: pytest.MonkeyPatch, protocol: str
) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://127.0.0.1:1")
    environment.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_CERTIFICATE: /nowhere: No such file"):
        await start_metering("gateway", "127.0.0.1", OFF)
    environment.setenv("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "/elsewhere")
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE: /elsewhere: No such file"):
        start_telemetry("galley-test", as_global=False)


async def test_a_collector_without_tls_needs_no_files(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    environment.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere")
    metering = await start_metering("gateway", "127.0.0.1", OFF)
    await metering.close()

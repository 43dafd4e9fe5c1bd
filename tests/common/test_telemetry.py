"""Spans leave the process by OTLP, with one trace over client and server."""

from __future__ import annotations

from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_rpc

from services.common.pb.galley.v1 import galley_pb2 as pb
from services.common.pb.galley.v1 import galley_pb2_grpc as rpc
from services.common.server import Parts, start_server
from services.common.telemetry import context_from, start_telemetry, traceparent
from tests.common.service import EchoService, building, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(otlp_rpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            self.services |= {
                entry.value.string_value
                for entry in resource.resource.attributes
                if entry.key == "service.name"
            }
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return otlp.ExportTraceServiceResponse()


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def collector(_clean: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A real OTLP gRPC collector, named by the environment."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    otlp_rpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]  # untyped
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    yield collector
    server.stop(None).wait()


async def test_one_trace_goes_over_client_and_server(collector: Collector) -> None:
    telemetry = start_telemetry("galley-test", as_global=False)
    running = await start_server(settings(), building(EchoService()), Parts(telemetry=telemetry))
    with telemetry.tracer("test").start_as_current_span("round") as span:
        inside = traceparent()
        async with grpc.aio.insecure_channel(
            running.address, interceptors=telemetry.client_interceptors()
        ) as channel:
            stub = rpc.DraftStub(channel)
            await stub.Propose(pb.ProposeRequest())
            async for _ in stub.ProposeStream(iter([pb.ProposeStreamRequest()])):
                pass
    await running.stop()
    telemetry.shutdown()
    trace_id = span.get_span_context().trace_id
    assert inside.split("-")[1] == trace.format_trace_id(trace_id)
    assert {sent.trace_id for sent in collector.spans} == {trace_id.to_bytes(16, "big")}
    kinds = sorted((sent.name.rsplit("/", 1)[-1], sent.kind) for sent in collector.spans)
    assert kinds == [("Propose", 2), ("Propose", 3), ("ProposeStream", 2), ("ProposeStream", 3), ("round", 1)]
    assert collector.services == {"galley-test"}


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not start_telemetry("x").on
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not start_telemetry("x").on
    monkeypatch.delenv("OTEL_TRACES_EXPORTER")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    off = start_telemetry("x")
    assert not off.on
    assert off.client_interceptors() == off.server_interceptors() == []
    with off.tracer("x").start_as_current_span("nothing"):
        assert traceparent() == ""
    off.shutdown()


def test_a_context_comes_back_from_its_traceparent() -> None:
    span = trace.get_current_span(context_from(PARENT)).get_span_context()
    assert trace.format_trace_id(span.trace_id) == PARENT.split("-")[1]
    assert not trace.get_current_span(context_from("")).get_span_context().is_valid

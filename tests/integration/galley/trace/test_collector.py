"""The collector over a real socket, with the exporter that the services use."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_rpc
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from galley.client.errors import rpc_error
from galley.common.server.server import start_server
from galley.core.errors import Overloaded
from galley.trace.collector import Collector, CollectorSettings, build
from galley.trace.read import otlp_file
from galley.trace.read.otlp_file import Lines, OtlpFile, document_of, spans_in
from galley.trace.read.spans import Process, Span
from tests.fakes.trace_builder import Scene, otlp


@asynccontextmanager
async def collecting(path: Path, **given: object) -> AsyncIterator[str]:
    settings = CollectorSettings.model_validate({"file": path, **given})
    running = await start_server(settings, build(settings))
    try:
        yield running.address
    finally:
        await running.stop()


def read(path: Path) -> list[Span]:
    return [span for line in Lines(path) for span in spans_in(line.document())]


def a_request() -> Any:
    scene = Scene()
    scene.request().round().end()
    return otlp(scene.spans)


async def test_spans_of_the_sdks_exporter_arrive_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    async with collecting(path) as address:
        resource = Resource({"service.name": "galley-test", "service.instance.id": "one"})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"http://{address}", insecure=True)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        with provider.get_tracer("test").start_as_current_span("outer", attributes={"a": (1, 2)}) as outer:
            outer.add_event("happened", {"why": "no reason"})
            for _ in range(700):
                provider.get_tracer("test").start_span("inner").end()
        await asyncio.to_thread(provider.shutdown)
    spans = read(path)
    assert len(spans) == 701
    (reported,) = [span for span in spans if span.name == "outer"]
    assert reported.process == Process("galley-test", "one")
    assert reported.attributes == {"a": (1, 2)}
    assert [event.name for event in reported.events] == ["happened"]
    assert {span.parent_id for span in spans if span.name == "inner"} == {reported.span_id}


async def test_unreadable_or_too_large_spans_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    async with (
        collecting(path, max_message_bytes=1024) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        export: Any = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        for message, problem in ((b"\xff" * 30, "well-formed"), (b"x" * 2000, "at most 1024 bytes")):
            with pytest.raises(grpc.aio.AioRpcError, match=problem) as refused:
                await export(message)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert read(path) == []


async def test_excess_requests_are_refused_with_a_retry_delay(tmp_path: Path) -> None:
    entered, release = threading.Event(), threading.Event()

    class SlowFile(OtlpFile):
        def append(self, request: otlp_pb.ExportTraceServiceRequest) -> int:
            entered.set()
            release.wait(20)
            return super().append(request)

    request = a_request()
    path = tmp_path / "traces.jsonl"
    collector = Collector(SlowFile(path), max_waiting_bytes=int(1.5 * request.ByteSize()))
    context: Any = None
    first = asyncio.create_task(collector.Export(request, context))
    await asyncio.to_thread(entered.wait, 20)
    with pytest.raises(Overloaded) as refused:
        await collector.Export(request, context)
    assert refused.value.retry_after_s > 0
    release.set()
    assert await first == otlp_pb.ExportTraceServiceResponse()
    assert await collector.Export(request, context) == otlp_pb.ExportTraceServiceResponse()
    await collector.close()
    assert len(read(path)) == 4


async def test_spans_whose_ids_are_none_are_rejected_and_spoil_no_file(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    request = a_request()
    spans = request.resource_spans[0].scope_spans[0].spans
    before = len(list(spans_in(document_of(request))))
    for name, value in (("trace_id", b"short"), ("span_id", b""), ("parent_span_id", b"7bytes.")):
        setattr(spans.add(trace_id=b"t" * 16, span_id=b"s" * 8), name, value)
    spans.add(trace_id=b"t" * 16, span_id=b"s" * 8).links.add(trace_id=b"t" * 16, span_id=b"s" * 9)
    async with collecting(path) as address, grpc.aio.insecure_channel(address) as channel:
        answer = await otlp_rpc.TraceServiceStub(channel).Export(request)  # type: ignore[no-untyped-call]  # untyped
    assert answer.partial_success.rejected_spans == 4
    assert len(read(path)) == before


async def test_too_large_spans_are_reported_as_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp_file, "MAX_LINE_BYTES", 200)
    async with (
        collecting(tmp_path / "traces.jsonl") as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = otlp_rpc.TraceServiceStub(channel)  # type: ignore[no-untyped-call]  # untyped
        answer = await stub.Export(a_request())
    assert answer.partial_success.rejected_spans == 2
    assert answer.partial_success.error_message


async def test_unwritable_file_is_an_internal_error_without_retry(tmp_path: Path) -> None:
    class FullDisk(OtlpFile):
        def append(self, request: otlp_pb.ExportTraceServiceRequest) -> int:
            raise OSError("no space left on device")

    settings = CollectorSettings.model_validate({"file": tmp_path / "traces.jsonl"})

    async def build_it(server: grpc.aio.Server, _parts: object) -> Any:
        collector = Collector(FullDisk(settings.file))
        otlp_rpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
        return collector

    running = await start_server(settings, build_it)
    async with grpc.aio.insecure_channel(running.address) as channel:
        stub: Any = otlp_rpc.TraceServiceStub(channel)  # type: ignore[no-untyped-call]  # untyped
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Export(a_request())
    await running.stop()
    assert rpc_error(failed.value).code is grpc.StatusCode.INTERNAL

"""Streams that break: they continue at another gateway, or end with an error that is final."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, TraceFlags

from galley.client.client import NO_RETRIES, AsyncClient, AsyncStream, GalleyRpcError
from galley.client.errors import DeadlineExceededError, UnavailableError
from galley.client.options import Retries
from galley.common.tracing.telemetry import telemetry_to, traceparent_of
from galley.core.content import prefix_hash
from galley.core.errors import (
    Broken,
    Cancelled,
    Fenced,
    GalleyError,
    KeyReused,
    LogLost,
    Overloaded,
    Unavailable,
    UnknownSession,
)
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.gateway import SESSION, FakeChunk, FakeGateway, serving

NOWHERE = "127.0.0.1:1"
CALLER, READER = (
    SpanContext(number, number, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    for number in (0xABC, 0xDEF)
)
SOON = Retries(patience_s=1.0, start_patience_s=0.5, first_pause_s=0.01)


async def read(stream: AsyncStream) -> tuple[list[str | None], str]:
    events = [event async for event in stream]
    return [event.WhichOneof("event") for event in events], "".join(event.chunk.text for event in events)


async def generate(addresses: str, **options: Any) -> tuple[list[str | None], str]:
    async with AsyncClient(addresses, **options) as client:
        return await read(client.stream("x"))


@pytest.fixture
def two() -> Iterator[tuple[FakeGateway, FakeGateway, str]]:
    with ExitStack() as opened:
        first, second = FakeGateway(), FakeGateway()
        addresses = [opened.enter_context(serving(gateway)) for gateway in (first, second)]
        yield first, second, ",".join(addresses)


@pytest.mark.parametrize("fail_at", [0, 1, 2])
@pytest.mark.parametrize("error", [Unavailable("draining"), Cancelled("stopping")], ids=type)
async def test_broken_stream_continues_at_the_next_gateway(
    two: tuple[FakeGateway, FakeGateway, str], error: GalleyError, fail_at: int
) -> None:
    leaving, staying, addresses = two
    leaving.error, leaving.fail_at = error, fail_at
    async with AsyncClient(addresses) as client:
        stream = client.stream("x")
        events, text = await read(stream)
    assert text == "Hello, world!\n"
    assert events == ["started", "chunk", "chunk", "chunk", "finished"]
    assert stream.tokens == [11, 12, 13, 14]
    seen = [11, 12, 13][: (0, 1, 3)[fail_at]]
    expected = pb.ResumeRequest(
        session_id=SESSION, next_index=len(seen), seen_hash=prefix_hash(seen) if seen else b""
    )
    assert staying.requests == [expected]
    assert len(leaving.requests) == 1


@pytest.mark.parametrize("error", [Unavailable("draining"), Cancelled("stopping"), Fenced(SESSION)], ids=type)
async def test_break_after_the_end_is_ignored(
    two: tuple[FakeGateway, FakeGateway, str], error: GalleyError
) -> None:
    leaving, staying, addresses = two
    leaving.error, leaving.fail_at = error, len(leaving.script)
    events, text = await generate(addresses)
    assert text == "Hello, world!\n"
    assert events == ["started", "chunk", "chunk", "chunk", "finished"]
    assert not staying.requests


async def test_stream_survives_many_breaks(two: tuple[FakeGateway, FakeGateway, str]) -> None:
    script = tuple(FakeChunk((token,), f"{token} ") for token in range(8))
    for gateway in two[:2]:
        gateway.script, gateway.error = script, Unavailable("again")
    retries = Retries(first_pause_s=0.001)
    async with AsyncClient(two[2], retries=retries) as client:
        stream = client.stream("x")
        text = ""
        for index in range(len(script)):
            for gateway in two[:2]:
                gateway.fail_at = index + 1
            text += (await _next_chunk(stream)).text
        assert text == "0 1 2 3 4 5 6 7 "
        assert [event.WhichOneof("event") async for event in stream] == ["finished"]


async def _next_chunk(stream: AsyncStream) -> pb.Chunk:
    async for event in stream:
        if event.WhichOneof("event") == "chunk":
            return event.chunk
    raise AssertionError("the stream ended")


async def test_unstarted_stream_is_requested_again_with_its_key(
    two: tuple[FakeGateway, FakeGateway, str],
) -> None:
    first, second, addresses = two
    first.error, first.silent = Unavailable("draining"), True
    async with AsyncClient(f"{NOWHERE},{addresses}") as client:
        assert (await read(client.stream("x")))[1] == "Hello, world!\n"
        assert (await read(client.stream("x")))[1] == "Hello, world!\n"
    assert len(first.requests) == 1, "who failed is not asked first again"
    [request, repeated, other] = [*first.requests, *second.requests]
    assert isinstance(request, pb.GenerateRequest)
    assert isinstance(other, pb.GenerateRequest)
    assert request == repeated
    assert len(request.idempotency_key) >= 16
    assert other.idempotency_key != request.idempotency_key


async def test_single_address_is_retried() -> None:
    gateway = FakeGateway(error=Unavailable("draining"), fail_at=1, failures=3)
    with serving(gateway) as address:
        assert (await generate(address, retries=SOON))[1] == "Hello, world!\n"
    assert len(gateway.requests) == 4


@pytest.mark.parametrize(
    "error",
    [
        Fenced(SESSION),
        LogLost("other tokens"),
        UnknownSession(SESSION),
        KeyReused(),
        Broken("a bug"),
    ],
    ids=type,
)
async def test_final_errors_are_raised(two: tuple[FakeGateway, FakeGateway, str], error: GalleyError) -> None:
    first, second, addresses = two
    first.error, first.fail_at = error, 1
    with pytest.raises(GalleyRpcError):
        await generate(addresses)
    assert not second.requests


async def test_overloaded_gateway_refuses_new_streams_and_delays_resumed_ones(
    two: tuple[FakeGateway, FakeGateway, str],
) -> None:
    first, second, addresses = two
    first.error = second.error = Overloaded("full", 0.05)
    first.silent = second.silent = True
    async with AsyncClient(addresses) as client:
        with pytest.raises(GalleyRpcError) as caught:
            await read(client.stream("x"))
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not second.requests
        first.failures = second.failures = 1
        assert (await read(client.resume(SESSION, 1)))[1] == ", world!\n"


@pytest.mark.parametrize("silent", [True, False])
async def test_retries_end_at_the_timeout(silent: bool) -> None:
    gateway = FakeGateway(error=Unavailable("for ever"), fail_at=1, silent=silent)
    with serving(gateway) as address:
        began_s = time.monotonic()
        with pytest.raises(GalleyRpcError, match="for ever"):
            await generate(address, retries=SOON)
        took_s = time.monotonic() - began_s
    assert took_s < SOON.patience_s + 1
    assert 2 < len(gateway.requests) < 12, "the pauses grow"


async def test_no_retries() -> None:
    gateway = FakeGateway(error=Unavailable("draining"), fail_at=1)
    with serving(gateway) as address, pytest.raises(GalleyRpcError):
        await generate(address, retries=NO_RETRIES)
    assert len(gateway.requests) == 1


async def test_deadline_covers_all_attempts() -> None:
    gateway = FakeGateway(error=Unavailable("for ever"), fail_at=1)
    with serving(gateway) as address:
        async with AsyncClient(address) as client:
            async with asyncio.timeout(30):
                with pytest.raises(GalleyRpcError):
                    await read(client.stream("x", timeout_s=0.5))
    assert gateway.deadline_s is not None


async def test_the_deadline_of_a_unary_call_covers_all_gateways() -> None:
    class Slow(FakeGateway):
        def GetModelInfo(
            self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext
        ) -> pb.GetModelInfoResponse:
            time.sleep(0.3)
            context.abort(grpc.StatusCode.UNAVAILABLE, "draining")

    other = FakeGateway()
    with serving(Slow()) as slow, serving(other) as address:
        async with AsyncClient([slow, address]) as client:
            await client.model_info(timeout_s=30)
    assert other.deadline_s is not None
    assert other.deadline_s < 29.8


async def test_cancelled_stream_is_not_resumed() -> None:
    gateway = FakeGateway(hang=True, fail_at=1)
    with serving(gateway) as address:
        async with AsyncClient(address) as client:
            stream = client.stream("x")
            await _next_chunk(stream)
            stream.cancel()
            assert [event async for event in stream] == []
            with pytest.raises(RuntimeError, match="cancelled"):
                await stream.result()
    assert len(gateway.requests) == 1


@pytest.mark.parametrize("retries", [SOON, NO_RETRIES], ids=["retries", "no retries"])
async def test_a_cancelled_stream_leaves_no_gateway(
    two: tuple[FakeGateway, FakeGateway, str], retries: Retries
) -> None:
    first, second, addresses = two
    first.hang, first.fail_at = True, 1
    async with AsyncClient(addresses, retries=retries) as client:
        stream = client.stream("x")
        await _next_chunk(stream)
        stream.cancel()
        for _ in range(3):
            with pytest.raises(RuntimeError, match="cancelled"):
                await stream.result()
        assert len(first.requests) == 1
        assert (await client.generate("x")).text == "Hello, world!\n"
    assert not second.requests


@pytest.mark.parametrize("silent", [False, True], ids=["started", "not started"])
@pytest.mark.parametrize("retries", [SOON, NO_RETRIES], ids=["retries", "no retries"])
async def test_a_reader_that_gives_up_continues_at_the_same_gateway(
    two: tuple[FakeGateway, FakeGateway, str], retries: Retries, silent: bool
) -> None:
    """gRPC cancels the call of a cancelled reader, which is no fault of the gateway."""
    first, second, addresses = two
    first.hang, first.silent = True, silent
    async with AsyncClient(addresses, retries=retries) as client:
        stream = client.stream("x")
        if not silent:
            await anext(stream)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.2)
        assert (await stream.result()).text == "Hello, world!\n"
    assert len(first.requests) == 2
    assert not second.requests


async def test_skipped_tokens_are_an_error() -> None:
    class Skipping(FakeGateway):
        def Resume(
            self, request: pb.ResumeRequest, context: grpc.ServicerContext
        ) -> Iterator[pb.ResumeResponse]:
            request.next_index += 1
            return super().Resume(request, context)

    gateway = Skipping(error=Unavailable("draining"), fail_at=1, failures=1)
    with serving(gateway) as address, pytest.raises(GalleyRpcError, match="continued at token"):
        await generate(address, retries=SOON)


async def test_unary_calls_use_the_first_available_gateway() -> None:
    with serving(FakeGateway()) as address:
        async with AsyncClient([NOWHERE, address]) as client:
            assert (await client.model_info()).model == "tiny"
            await client.abort(SESSION)
        async with AsyncClient([NOWHERE]) as client:
            with pytest.raises(GalleyRpcError) as caught:
                await client.model_info()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_unary_calls_that_a_stopping_gateway_cancels_go_to_the_next() -> None:
    class Stopping(FakeGateway):
        def GetModelInfo(
            self, request: pb.GetModelInfoRequest, context: grpc.ServicerContext
        ) -> pb.GetModelInfoResponse:
            context.abort(grpc.StatusCode.CANCELLED, "the gateway stops")

    other = FakeGateway()
    with serving(Stopping()) as first, serving(other) as second:
        async with AsyncClient([first, second]) as client:
            assert (await client.model_info()).model == "tiny"
            await client.generate("x")
    assert len(other.requests) == 1


async def test_a_gateway_that_is_down_is_left_although_nothing_is_retried() -> None:
    gateway = FakeGateway()
    with serving(gateway) as address:
        async with AsyncClient([NOWHERE, address], retries=NO_RETRIES) as client:
            with pytest.raises(UnavailableError):
                await client.generate("x")
            assert (await client.generate("x")).text == "Hello, world!\n"


async def test_an_error_that_is_read_again_leaves_no_other_gateway() -> None:
    with serving(FakeGateway()) as address:
        async with AsyncClient([NOWHERE, address], retries=NO_RETRIES) as client:
            stream = client.stream("x")
            for _ in range(2):
                with pytest.raises(UnavailableError):
                    await anext(stream)
            assert (await client.generate("x")).text == "Hello, world!\n"


async def test_a_gateway_that_sends_nothing_before_the_deadline_is_left(
    two: tuple[FakeGateway, FakeGateway, str],
) -> None:
    silent, other, addresses = two
    silent.silent = silent.hang = True
    async with AsyncClient(addresses) as client:
        with pytest.raises(DeadlineExceededError):
            await client.generate("x", timeout_s=0.4)
        assert (await client.generate("x")).text == "Hello, world!\n"
    assert len(other.requests) == 1


async def test_a_unary_call_leaves_a_gateway_that_does_not_respond() -> None:
    silent = FakeGateway(hang=True)
    with serving(silent) as first, serving(FakeGateway()) as second:
        async with AsyncClient([first, second]) as client:
            with pytest.raises(DeadlineExceededError):
                await client.model_info(timeout_s=0.4)
            assert (await client.model_info(timeout_s=30)).model == "tiny"


async def test_unary_calls_that_fail_together_leave_the_gateway_once() -> None:
    with serving(FakeGateway()) as address:
        async with AsyncClient([NOWHERE, address], retries=NO_RETRIES) as client:
            responses = await asyncio.gather(*(client.model_info() for _ in range(4)))
            assert [response.model for response in responses] == ["tiny"] * 4
            assert (await client.generate("x")).text == "Hello, world!\n"


def test_no_address() -> None:
    with pytest.raises(ValueError, match="address"):
        AsyncClient(" , ")


@pytest.mark.parametrize("by_call", [True, False])
async def test_stream_stays_in_the_trace_of_its_request(
    two: tuple[FakeGateway, FakeGateway, str], by_call: bool
) -> None:
    leaving, staying, addresses = two
    leaving.error, leaving.fail_at = Unavailable("draining"), 1
    async with AsyncClient(addresses, force_trace=not by_call) as client:
        with trace.use_span(trace.NonRecordingSpan(CALLER)):
            stream = client.stream("x", force_trace=True) if by_call else client.stream("x")
        with trace.use_span(trace.NonRecordingSpan(READER)):
            await read(stream)
    for metadata in (*leaving.metadata, *staying.metadata):
        assert metadata["traceparent"] == f"00-{CALLER.trace_id:032x}-{CALLER.span_id:016x}-01"
        assert metadata["x-galley-trace"] == "force"
    assert [type(request).__name__ for request in (*leaving.requests, *staying.requests)] == [
        "GenerateRequest",
        "ResumeRequest",
    ]


async def test_a_stream_numbers_its_calls(two: tuple[FakeGateway, FakeGateway, str]) -> None:
    leaving, staying, addresses = two
    leaving.error, leaving.fail_at = Unavailable("draining"), 1
    async with AsyncClient(addresses, retries=SOON) as client:
        stream = client.stream("x")
        await read(stream)
        await read(client.resume_stream(stream))
        await read(client.stream("y"))
    noted = (*leaving.metadata, *staying.metadata)
    calls = [str(metadata["x-galley-attempt"]).rpartition("-") for metadata in noted]
    assert [number for _, _, number in calls] == ["1", "2", "3", "1"]
    assert calls[0][0] == calls[1][0] == calls[2][0] != calls[3][0]


async def test_no_trace_context_without_a_trace() -> None:
    gateway = FakeGateway()
    with serving(gateway) as address:
        async with AsyncClient(address) as client:
            await read(client.stream("x"))
            with trace.use_span(trace.NonRecordingSpan(CALLER)):
                await read(client.resume(SESSION, 0))
    request, resumed = gateway.metadata
    assert not {"traceparent", "x-galley-trace"} & request.keys()
    assert "x-galley-trace" not in resumed
    assert "traceparent" in resumed


async def test_spans_of_the_client(
    two: tuple[FakeGateway, FakeGateway, str],
) -> None:
    leaving, staying, addresses = two
    leaving.error, leaving.fail_at = Unavailable("draining"), 1
    kept = InMemorySpanExporter()
    telemetry = telemetry_to(SimpleSpanProcessor(kept), "client")
    async with AsyncClient(addresses, interceptors=telemetry.client_interceptors()) as client:
        with trace.use_span(trace.NonRecordingSpan(CALLER)):
            stream = client.stream("x")
        await read(stream)
    spans = kept.get_finished_spans()
    assert [span.parent and span.parent.span_id for span in spans] == [CALLER.span_id] * 2
    reported = [metadata["traceparent"] for metadata in (*leaving.metadata, *staying.metadata)]
    assert reported == [traceparent_of(span.context) for span in spans]

"""A run of a whole stack whose traces go to a collector."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from galley.client.client import (
    NO_RETRIES,
    AsyncClient,
    AsyncStream,
    GalleyRpcError,
    w3c_metadata,
)
from galley.client.options import GenerateOptions, Speculation
from galley.client.request import generate_request
from galley.common.redis.calls import RedisCalls
from galley.common.tracing.telemetry import Telemetry, start_telemetry
from galley.core import names
from galley.core.names import NGRAM
from galley.stack.stack import Stack, StackOptions
from galley.trace.read.otlp_file import document_of, spans_in
from galley.trace.read.spans import Span, SpanKey
from tests.fakes.collector import Collector
from tests.fakes.narrow_client import narrow
from tests.fakes.waiting import PATIENCE_S

CLIENT = "galley-client"
ASK = "ask"
"""The span of the client's own that a request is made in."""
# Greedy, a model of random weights soon repeats itself: lookup is right then.
PROMPT = [5, 9, 2, 33, 5, 9, 2, 33, 5, 9]
STREAMS = 4
TARGETS = ("target", "target-2")
MAX_TOKENS = 100
READ_TOKENS = 4
OPTIONS = GenerateOptions(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
FIXED = Speculation(k=4)


@dataclass
class Run:
    """The exported spans; trace ids of the requests that were answered, refused, or cut off by a kill."""

    export: ExportTraceServiceRequest = field(default_factory=ExportTraceServiceRequest)
    whole: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    cut_from_target: list[str] = field(default_factory=list)
    cut_from_gateway: list[str] = field(default_factory=list)
    killed_target: str = ""

    @cached_property
    def spans(self) -> dict[SpanKey, Span]:
        return {span.key: span for span in spans_in(document_of(self.export))}

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans.values() if span.trace_id == trace_id]


class _Client:
    """A client with spans of its own."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._tracer = telemetry.tracer("test")

    async def ask(self, made: list[str], client: AsyncClient, **options: object) -> AsyncStream:
        """Read a whole answer within a span; append its trace to `made`."""
        with self._tracer.start_as_current_span(ASK) as span:
            made.append(f"{span.get_span_context().trace_id:032x}")
            stream = client.stream(PROMPT, **{**OPTIONS, **options})  # type: ignore[arg-type]  # as a dict
            await _read(stream)
        return stream

    async def cut(self, made: list[str], address: str, cutting: _Cut) -> None:
        """Read no further than READ_TOKENS before the cut; little more is buffered anywhere."""
        with self._tracer.start_as_current_span(ASK) as span:
            made.append(f"{span.get_span_context().trace_id:032x}")
            async with narrow(address, 1024) as stub:
                request = generate_request(PROMPT, {**OPTIONS, "logprobs": 20, "speculation": FIXED})
                stream = AsyncStream(stub.Generate(request, metadata=w3c_metadata()))
                await _read(stream, READ_TOKENS)
                await cutting.wait(stream)
                if cutting.other is None:
                    await _read(stream)
                    return
            async with AsyncClient(cutting.other, retries=NO_RETRIES) as client:
                await _read(client.resume_stream(stream))


class _Cut:
    """A kill once `count` streams have some tokens; `other` is the gateway at which they are resumed."""

    def __init__(self, count: int, other: str | None = None) -> None:
        self.other = other
        self.streams: list[AsyncStream] = []
        self._barrier = asyncio.Barrier(count + 1)
        self._done = asyncio.Event()

    async def wait(self, stream: AsyncStream) -> None:
        self.streams.append(stream)
        await self._barrier.wait()
        await self._done.wait()

    async def ready(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self._barrier.wait()

    def done(self) -> None:
        self._done.set()


async def _read(stream: AsyncStream, until: int = MAX_TOKENS) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async for _ in stream:
            if len(stream.tokens) >= until and stream.finished is None and until < MAX_TOKENS:
                return
    assert stream.finished is not None
    assert len(stream.tokens) == MAX_TOKENS


async def traced_run(model: Path) -> Run:
    """Request whole answers, have one refused, kill a target, kill a gateway."""
    run = Run()
    with tempfile.TemporaryDirectory(prefix="galley-") as directory:
        async with Collector(Path(directory)) as collector:
            async with _stack(model, collector.endpoint) as (stack, client):
                await _ask(run, stack, client)
                await _kill_target(run, stack, client)
                await _kill_gateway(run, stack, client, collector)
            # The processes that stopped in order have exported all their spans.
            run.export = ExportTraceServiceRequest.FromString(collector.exported)
    return run


@asynccontextmanager
async def _stack(model: Path, endpoint: str) -> AsyncIterator[tuple[Stack, _Client]]:
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_TRACES_INSECURE": "true",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    options = StackOptions(
        model=str(model),
        draft_model="none",
        strategy=NGRAM,
        dtype="float32",
        gateways=2,
        replicas=2,
        env=environment,
        extra_args={
            "gateway": ["--draft-timeout-s", "10", "--buffer", "8"],
            "target": ["--kv-memory-mb", "8"],
        },
    )
    async with AsyncExitStack() as opened:
        patched = opened.enter_context(pytest.MonkeyPatch.context())
        for name, value in environment.items():
            patched.setenv(name, value)
        telemetry = start_telemetry(CLIENT, as_global=False)
        opened.push_async_callback(asyncio.to_thread, telemetry.shutdown)
        yield await opened.enter_async_context(Stack(options)), _Client(telemetry)


async def _ask(run: Run, stack: Stack, client: _Client) -> None:
    async with AsyncClient(stack.address("gateway"), retries=NO_RETRIES) as galley:
        asking = (client.ask(run.whole, galley, speculation=FIXED) for _ in range(STREAMS))
        await asyncio.gather(*asking)
        with pytest.raises(GalleyRpcError):
            await client.ask(run.refused, galley, max_tokens=0)


async def _kill_target(run: Run, stack: Stack, client: _Client) -> None:
    cut = _Cut(STREAMS)
    async with asyncio.TaskGroup() as streams:
        for _ in range(STREAMS):
            streams.create_task(client.cut(run.cut_from_target, stack.address("gateway"), cut))
        await cut.ready()
        run.killed_target, *_ = await stored_field(stack, cut.streams, "target_replica")
        await stack.kill(next(name for name in TARGETS if stack.address(name) == run.killed_target))
        cut.done()


async def _kill_gateway(run: Run, stack: Stack, client: _Client, collector: Collector) -> None:
    cut = _Cut(1, stack.address("gateway"))
    async with asyncio.TaskGroup() as streams:
        streams.create_task(client.cut(run.cut_from_gateway, stack.address("gateway-2"), cut))
        await cut.ready()
        [trace_id] = run.cut_from_gateway
        await collector.has(names.ROUND, trace_id=bytes.fromhex(trace_id))
        await stack.kill("gateway-2")
        cut.done()


async def stored_field(stack: Stack, streams: list[AsyncStream], field: str) -> list[str]:
    """Return a field of each session in the store; `target_replica` is that of the KV directory."""
    calls = RedisCalls(f"unix://{stack.address('valkey')}", call_timeout_s=5, max_connections=1)
    try:
        keys = [f"galley:sessions:default:{{{one.session_id}}}" for one in streams]
        values = [await calls.command("HGET", key, field) for key in keys]
    finally:
        await calls.close()
    return [value.decode() for value in values if isinstance(value, bytes)]

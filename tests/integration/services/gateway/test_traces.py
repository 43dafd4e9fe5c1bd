"""One trace holds a request with all that was done for it, and nothing of what it was about."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from galley.client.client import AsyncStream
from galley.client.options import GenerateOptions, Speculation
from galley.client.request import generate_request
from galley.core.content import token_bytes
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.collector import Collector
from tests.fakes.processes import gateway_process
from tests.fakes.truth import SEED, text_of, true_output
from tests.fakes.world import MAX_TOKENS, PROMPT, PROMPT_TOKENS, World, must_be_true, receive

TRACE = bytes(range(1, 17))
PARENT = bytes(range(1, 9))


async def test_one_trace_holds_a_request_without_content(world: World, tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
    async with Collector(world.directory) as collector:
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.endpoint
        environment["OTEL_EXPORTER_OTLP_INSECURE"] = "true"
        async with gateway_process(world, log, environment) as reported:
            await generate_within_a_trace(reported["address"])
            await collector.has("text_completion tiny", "round")
        spans = collector.in_trace(TRACE)
        exported = collector.exported

    by_id = {span.span_id: span for span in spans}

    def chain(span: Span) -> list[str]:
        names = [span.name]
        while span.parent_span_id != PARENT:
            span = by_id[span.parent_span_id]
            names.append(span.name)
        return names

    request = "text_completion tiny"
    must_be = {
        (request,),
        ("EVALSHA create", request),
        ("EVALSHA finish", request),
        ("round", request),
        ("galley.v1.Draft/Propose", "round", request),
        ("galley.v1.Target/Verify", "round", request),
    }
    may_be = {("EVALSHA commit", request)}
    assert must_be <= {tuple(chain(span)) for span in spans} <= must_be | may_be
    rounds = [span for span in spans if span.name == "round"]
    assert len(rounds) == len(world.target.calls) >= MAX_TOKENS // 5

    for pool in (world.draft, world.target):
        assert {item.slice.traceparent.split("-")[1] for item in pool.calls} == {TRACE.hex()}

    session_id = world.target.calls[0].slice.session_id.encode()
    assert session_id in exported
    assert session_id in log.read_bytes()
    answer = true_output(PROMPT_TOKENS, MAX_TOKENS, SEED)
    written = log.read_bytes()
    for content in (PROMPT, text_of(answer)[:8], text_of(answer)[-8:]):
        for data in (exported, written):
            assert content.encode() not in data
    for tokens in (PROMPT_TOKENS, answer):
        assert token_bytes(tokens)[:16] not in exported
        assert repr(token_bytes(tokens))[2:18].encode() not in exported
        assert struct.pack("4B", *tokens[:4]) not in exported
        assert ", ".join(map(str, tokens[:4])).encode() not in exported + written
    assert b"Traceback" not in written, written.decode()

    lines = [json.loads(line) for line in written.splitlines()]
    [ended] = [line for line in lines if line["event"] == "call finished"]
    [of_request] = [span for span in spans if span.name == request]
    assert (ended["trace_id"], ended["span_id"]) == (TRACE.hex(), of_request.span_id.hex())
    assert (ended["session_id"], ended["level"]) == (session_id.decode(), "info")


async def generate_within_a_trace(address: str) -> None:
    options = GenerateOptions(max_tokens=MAX_TOKENS, seed=SEED, ignore_eos=True, speculation=Speculation(k=4))
    request = generate_request(PROMPT, options)
    async with grpc.aio.insecure_channel(address) as channel:
        stub: rpc.GenerationAsyncStub = rpc.GenerationStub(channel)
        metadata = (("traceparent", f"00-{TRACE.hex()}-{PARENT.hex()}-01"),)
        must_be_true(await receive(AsyncStream(stub.Generate(request, metadata=metadata))))

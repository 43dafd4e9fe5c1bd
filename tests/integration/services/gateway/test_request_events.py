"""What happens to a request stands in its trace: refusals, failures, moves, resumes. And exporters fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from galley.client.options import Message
from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.server.server import Parts
from galley.common.tracing import telemetry
from galley.common.tracing.telemetry import telemetry_to
from galley.core import names
from tests.fakes.fleet import Fleet
from tests.fakes.readings import count
from tests.fakes.spans import KeptSpans, attributes_of, error_of
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, PROMPT, Received, World, any_credit, must_be_true, receive, refused
from tests.integration.services.gateway.callers import ALICE, KeyFile, calling


@pytest.fixture
def kept() -> KeptSpans:
    return KeptSpans()


async def test_an_unauthenticated_caller_cannot_force_a_trace(
    world: World, kept: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    gateway = await world.gateway_of(kept.parts(), api_keys_file=KeyFile().write(world))
    await refused(receive(gateway.generate(force_trace=True)))
    async with calling(gateway, ALICE) as alice:
        must_be_true(await receive(alice.generate(force_trace=True)))
    [request] = await kept.requests()
    assert error_of(request) is None


async def test_a_refused_call_is_traced_with_its_reason(world: World, kept: KeptSpans) -> None:
    gateway = await world.gateway_of(kept.parts(), api_keys_file=KeyFile().write(world), max_sessions=1)
    await refused(receive(gateway.generate()))
    async with calling(gateway, ALICE) as alice:
        await refused(receive(alice.generate(max_tokens=0)))
        await refused(receive(alice.generate(model="x" * 1000)))
        await refused(receive(alice.client.resume("0" * 32, 0)))
        world.target.gate.close()
        stream = alice.generate()
        await world.target.called(1)
        await refused(receive(alice.generate()))
        world.target.gate.open()
        must_be_true(await receive(stream))
    requests = await kept.requests(6)
    assert [error_of(span) for span in requests] == [
        "unauthenticated",
        "invalid_argument",
        "invalid_argument",
        "not_found",
        "resource_exhausted",
        None,
    ]
    names_of = [span.name for span in requests]
    assert names_of == [
        "text_completion",
        "text_completion tiny",
        "text_completion",
        *["text_completion tiny"] * 3,
    ]
    for span in requests:
        assert attributes_of(span).keys() >= {names.OPERATION, names.PROVIDER, names.RPC_STATUS}
        assert len(str(attributes_of(span).get(names.REQUEST_MODEL, ""))) < 200
        kept.must_hang_together(span)
    assert attributes_of(requests[3])[names.RPC_METHOD] == "Resume"
    [read] = kept.below(requests[3])
    assert (read.name, error_of(read)) == ("EVALSHA read", "not_found")


async def test_a_resumed_stream_links_to_the_one_before(world: World, kept: KeptSpans) -> None:
    first, second = await world.gateway_of(kept.parts()), await world.gateway_of(kept.parts())
    stream, received = await world.held(first, 3)
    stream.cancel()
    [left] = await kept.requests()
    index = stream.resume_from().next_index
    world.target.gate.open()
    must_be_true(await received.listen(second.client.resume_stream(stream)))
    [_, resumed] = await kept.requests(2)
    assert error_of(left) == "cancelled"
    assert error_of(resumed) is None
    must_continue(resumed, left)
    assert kept.events(resumed, names.SESSION_RESUMED) == [{names.EPOCH: 2, names.INDEX: index}]
    assert attributes_of(resumed)[names.OUTPUT_TOKENS] == MAX_TOKENS
    for request in (left, resumed):
        kept.must_hang_together(request)


def must_continue(resumed: ReadableSpan, before: ReadableSpan) -> None:
    assert resumed.context.trace_id != before.context.trace_id
    [link] = resumed.links
    assert (link.context.trace_id, link.context.span_id) == (before.context.trace_id, before.context.span_id)
    assert dict(link.attributes or {}) == {names.LINK: names.LINK_CONTINUES}
    assert (attributes_of(resumed)[names.RESUMED], attributes_of(resumed)[names.EPOCH]) == (True, 2)
    assert attributes_of(before)[names.SESSION_ID] == attributes_of(resumed)[names.SESSION_ID]


async def test_a_resumed_chat_is_still_a_chat(world: World, kept: KeptSpans) -> None:
    registry = Registry(GATEWAY)
    first, second = await world.gateway_of(Parts()), await world.gateway_of(kept.parts(metrics=registry))
    stream, received = await world.held(first, 3, (Message("user", PROMPT),))
    stream.cancel()
    world.target.gate.open()
    await received.listen(second.client.resume_stream(stream))
    assert received.finished is not None
    [resumed] = await kept.requests()
    assert (resumed.name, attributes_of(resumed)[names.OPERATION]) == ("chat tiny", names.CHAT)
    await second.idle()
    labels = (names.CHAT, names.GALLEY, "tiny", "tiny", "")
    assert count(registry, catalogue.REQUEST_DURATION, *labels) == 1


async def test_a_fenced_owner_and_its_successor_are_both_traced(
    world: World, kept: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    first, second = await world.gateway_of(kept.parts()), await world.gateway_of(kept.parts())
    stream, received = await world.held(first, 3, force_trace=True)
    resumed_stream = second.client.resume_stream(stream)
    received.receive(await anext(resumed_stream))
    world.target.gate.open()
    must_be_true(await received.listen(resumed_stream))
    assert (
        await refused(receive(stream, first_index=len(stream.tokens)))
    ).code is grpc.StatusCode.FAILED_PRECONDITION
    requests = await kept.requests(2)
    [fenced] = [span for span in requests if not span.links]
    [resumed] = [span for span in requests if span.links]
    assert error_of(fenced) == "failed_precondition"
    assert kept.events(fenced, names.SESSION_FENCED) == [{}]
    must_continue(resumed, fenced)
    assert "EVALSHA claim" in {span.name for span in kept.below(resumed)}
    assert len(kept.rounds(resumed)) == attributes_of(resumed)[names.ROUNDS]
    for request in requests:
        kept.must_hang_together(request)


async def test_a_call_with_the_same_key_links_to_the_one_before(world: World, kept: KeptSpans) -> None:
    gateway = await world.gateway_of(kept.parts())
    for _ in range(2):
        must_be_true(await receive(gateway.generate(idempotency_key="again")))
    [before, joined] = await kept.requests(2)
    must_continue(joined, before)
    assert attributes_of(joined)[names.ROUNDS] == 0, "the answer was there"


@any_credit
async def test_a_retried_request_is_traced(world: World, kept: KeptSpans, credit: int) -> None:
    gateway = await world.gateway_of(kept.parts(), credit=credit)
    world.target.gate.close_after(2)
    stream = gateway.generate()
    await world.target.waits_after(2)
    world.target.fail(grpc.StatusCode.UNAVAILABLE, times=1)
    world.target.gate.open()
    must_be_true(await receive(stream))
    [request] = await kept.requests()
    kept.must_hang_together(request)
    [retried] = kept.events(request, names.REQUEST_RETRIED)
    [failed] = [span for span in kept.below(request) if error_of(span) is not None]
    kind = error_of(failed)
    assert kind in {"unavailable", "internal"}, "the latter is gRPC's own where it was about to write"
    assert (failed.name, retried[names.POOL]) == (names.VERIFY, "target")
    assert retried[names.REASON].startswith(f"{kind.upper()}: ")
    assert error_of(request) is None


async def test_a_move_to_another_target_is_traced(world: World, kept: KeptSpans) -> None:
    async with Fleet(world) as fleet:
        await fleet.register()
        gateway = await world.gateway_of(kept.parts(), target="", credit=32)
        fleet.hold_after(0)
        stream = gateway.generate()
        first, second = fleet.members
        queries = [asyncio.ensure_future(target.fake.called(1)) for target in fleet.members]
        await asyncio.wait(queries, return_when=asyncio.FIRST_COMPLETED)
        for waiting in queries:
            waiting.cancel()
        doomed, other = (first, second) if first.fake.calls else (second, first)
        doomed.fake.gate.permit(1)
        received = await Received().listen(stream, until=1)
        await doomed.fake.stop()
        other.fake.gate.open()
        must_be_true(await received.listen(stream))
    [request] = await kept.requests()
    kept.must_hang_together(request)
    [moved] = kept.events(request, names.SESSION_MOVED)
    assert moved == {
        names.POOL: "target",
        names.SOURCE: doomed.fake.address,
        names.TO: other.fake.address,
        names.REASON: "failed",
    }
    assert attributes_of(request)[names.MOVES] == 1
    served = {attributes_of(span)[names.TARGET_REPLICA] for span in kept.rounds(request)}
    assert served == {doomed.fake.address, other.fake.address}


async def test_a_change_of_drafting_is_traced(world: World, kept: KeptSpans) -> None:
    await world.draft.stop()
    gateway = await world.gateway_of(kept.parts(), lookup_fallback=True, strategy="model")
    world.target.gate.close_after(3)
    stream = gateway.generate()
    await world.target.waits_after(3)
    await world.draft.start()
    async with asyncio.timeout(PATIENCE_S):
        while not (await gateway.client.model_info()).strategies:
            pass
    world.target.gate.open()
    must_be_true(await receive(stream))
    [request] = await kept.requests()
    changes = kept.events(request, names.DRAFT_DEGRADED)
    assert [change[names.TO] for change in changes] == ["ngram", "draft"]
    assert changes[0][names.REASON] == "away"
    strategies = [attributes_of(span)[names.ROUND_STRATEGY] for span in kept.rounds(request)]
    assert "model" in strategies
    assert set(strategies) <= {"none", "lookup", "model"}


async def test_a_late_draft_is_traced(world: World, kept: KeptSpans) -> None:
    world.draft.gate.close()
    gateway = await world.gateway_of(kept.parts(), draft_timeout_s=0.2)
    must_be_true(await receive(gateway.generate()))
    [request] = await kept.requests()
    [late] = kept.events(request, names.DRAFT_DEGRADED)
    assert late == {names.TO: "plain", names.REASON: "late"}
    proposals = [span for span in kept.below(request) if span.name == names.PROPOSE]
    assert error_of(proposals[0]) == "deadline_exceeded"
    assert error_of(request) is None


async def test_an_abort_is_traced_with_its_store_call(world: World, kept: KeptSpans) -> None:
    gateway = await world.gateway_of(kept.parts())
    stream = gateway.generate()
    must_be_true(await receive(stream))
    await gateway.client.abort(stream.session_id)
    await refused(gateway.client.abort("0" * 32))
    name = "/galley.v1.Generation/Abort"
    await kept.has(name, 2)
    done, failed = [span for span in kept.spans if span.name == name]
    assert (error_of(done), error_of(failed)) == (None, "not_found")
    for span, error in ((done, None), (failed, "not_found")):
        [abort] = kept.below(span)
        assert abort.parent is not None
        assert abort.parent.span_id == span.context.span_id
        assert (abort.name, error_of(abort)) == ("EVALSHA abort", error)


class Hanging(SpanExporter):
    def __init__(self, *, waits: bool) -> None:
        self.called = threading.Event()
        self.may_answer = threading.Event()
        if not waits:
            self.may_answer.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.called.set()
        self.may_answer.wait()
        return SpanExportResult.FAILURE


@pytest.mark.parametrize("waits", [False, True], ids=["fails", "hangs"])
async def test_a_failing_exporter_harms_no_stream(
    world: World, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    exporter = Hanging(waits=waits)
    processor = BatchSpanProcessor(
        exporter, max_queue_size=4, max_export_batch_size=2, schedule_delay_millis=1
    )
    traces = telemetry_to(processor, "galley-gateway")
    gateway = await world.gateway_of(Parts(telemetry=traces))
    for received in await asyncio.gather(*(receive(gateway.generate()) for _ in range(3))):
        must_be_true(received)
    assert await asyncio.to_thread(exporter.called.wait, 10)
    monkeypatch.setattr(telemetry, "FLUSH_S", 0.05)
    await asyncio.to_thread(traces.shutdown)
    exporter.may_answer.set()
    await asyncio.to_thread(processor.shutdown)

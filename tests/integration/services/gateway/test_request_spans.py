"""What a gateway tells of a request: its own span, its rounds, what it asked of others, and no content."""

from __future__ import annotations

import json

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from galley.client.options import Message
from galley.common.tracing.telemetry import traceparent_of
from galley.core import names
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.telemetry.spans import SLOW_COMMIT_NS
from tests.fakes.spans import MS, KeptSpans, attributes_of, error_of, lasted_ns
from tests.fakes.truth import SEED
from tests.fakes.world import (
    MAX_TOKENS,
    PROMPT,
    PROMPT_TOKENS,
    Received,
    World,
    any_credit,
    must_be_true,
    receive,
)

REQUIRED = {names.OPERATION, names.PROVIDER, names.REQUEST_MODEL, names.SERVER_PORT}
"""By the conventions, some of them where other attributes are there, which they are."""
RECOMMENDED = {
    names.SERVER_ADDRESS,
    names.REQUEST_STREAM,
    names.MAX_TOKENS,
    names.TEMPERATURE,
    names.TOP_P,
    names.FREQUENCY_PENALTY,
    names.PRESENCE_PENALTY,
    names.REQUEST_SEED,
    names.RESPONSE_ID,
    names.RESPONSE_MODEL,
    names.FINISH_REASONS,
    names.INPUT_TOKENS,
    names.OUTPUT_TOKENS,
    names.CACHED_TOKENS,
    names.TIME_TO_FIRST_CHUNK,
}
BATCH = bytes(range(1, 25))
PARTS = (names.DRAFT_PART, names.QUEUE_PART, names.COMPUTE_PART, names.WIRE_PART)


@pytest.fixture
def kept() -> KeptSpans:
    return KeptSpans()


@any_credit
async def test_a_request_and_its_rounds_are_one_trace(world: World, kept: KeptSpans, credit: int) -> None:
    world.draft.spoil_rate = 0.2
    gateway = await world.gateway_of(kept.parts(), credit=credit)
    received = await receive(gateway.generate(workload="tests", stop=["never said"]))
    must_be_true(received)
    [request] = await kept.requests()
    kept.must_hang_together(request)
    must_describe_the_answer(request, received)
    rounds = kept.rounds(request)
    must_be_its_rounds(request, rounds)
    calls = [span for span in kept.below(request) if span.kind is SpanKind.CLIENT]
    store = {span.name for span in calls if span.name.startswith(names.EVALSHA)}
    assert (
        {"EVALSHA create", "EVALSHA finish"}
        <= store
        <= {"EVALSHA create", "EVALSHA finish", "EVALSHA commit"}
    )
    for span in calls:
        if span.name.startswith(names.EVALSHA):
            must_be_a_call_of_the_store(span, request)
    items = [span for span in calls if not span.name.startswith(names.EVALSHA)]
    must_be_items(items, rounds, world)
    assert attributes_of(rounds[0])[names.KV_REUSED] == 0
    assert sum(names.KV_REUSED in attributes_of(span) for span in rounds) == len(world.target.calls)


def must_describe_the_answer(request: ReadableSpan, received: Received) -> None:
    facts = attributes_of(request)
    assert received.started is not None
    assert (request.name, request.kind, request.parent) == ("text_completion tiny", SpanKind.SERVER, None)
    assert error_of(request) is None
    assert facts.keys() >= REQUIRED | RECOMMENDED
    assert facts[names.OPERATION] == names.TEXT_COMPLETION
    assert facts[names.PROVIDER] == "galley"
    assert facts[names.FINISH_REASONS] == ("length",)
    assert facts[names.INPUT_TOKENS] == len(PROMPT_TOKENS)
    assert facts[names.OUTPUT_TOKENS] == facts[names.MAX_TOKENS] == MAX_TOKENS
    assert facts[names.SESSION_ID] == facts[names.RESPONSE_ID] == received.started.session_id
    assert (facts[names.SEED], facts[names.REQUEST_SEED]) == (str(SEED), SEED)
    assert (facts[names.WORKLOAD], facts[names.SPECULATION_MODE]) == ("tests", "auto")
    assert (facts[names.RESUMED], facts[names.EPOCH]) == (False, 1)
    assert (facts[names.STOP_COUNT], facts[names.MOVES], facts[names.RPC_STATUS]) == (1, 0, 0)
    assert facts[names.FINGERPRINT] == "build-1"
    text: pb.SpeculationStats = received.end.speculation
    counted = (names.ROUNDS, names.DRAFTED, names.VERIFIED, names.ACCEPTED)
    assert [facts[name] for name in counted] == [text.rounds, text.drafted, text.verified, text.accepted]
    assert 0 < facts[names.TTFT_NS] <= lasted_ns(request)


def must_be_its_rounds(request: ReadableSpan, rounds: list[ReadableSpan]) -> None:
    facts = attributes_of(request)
    assert [attributes_of(span)[names.ROUND_INDEX] for span in rounds] == list(range(facts[names.ROUNDS]))
    position = len(PROMPT_TOKENS)
    for span in rounds:
        of = attributes_of(span)
        assert span.parent == request.context
        assert error_of(span) is None
        assert of[names.ROUND_POSITION] == position
        position += of[names.ROUND_CONFIRMED]
        assert abs(sum(of[part] for part in PARTS) - lasted_ns(span)) < MS
        assert all(of[part] >= 0 for part in PARTS)
        assert 0 < of[names.COMMIT_NS] <= facts[names.SLOWEST_COMMIT_NS]
        assert of[names.ROUND_ACCEPTED] <= of[names.ROUND_VERIFIED] <= of[names.ROUND_CONFIRMED] + 16
        assert of[names.ROUND_OVERLAP] in {"hit", "miss", "none"}
        assert of[names.ROUND_STRATEGY] == (
            "model" if of[names.ROUND_DRAFTED] or of[names.ROUND_VERIFIED] else "none"
        )
        assert of[names.TARGET_REPLICA].endswith("target")
        assert not of[names.ROUND_DRAFTED] or of[names.DRAFT_REPLICA].endswith("draft")
        must_lie_within(span, request)
    assert position == len(PROMPT_TOKENS) + MAX_TOKENS
    slowest = max(rounds, key=lasted_ns)
    assert facts[names.SLOWEST_ROUND_NS] == lasted_ns(slowest)
    assert facts[names.SLOWEST_ROUND_POSITION] == attributes_of(slowest)[names.ROUND_POSITION]


def must_lie_within(span: ReadableSpan, request: ReadableSpan) -> None:
    assert span.start_time is not None
    assert span.end_time is not None
    assert request.start_time is not None
    assert request.end_time is not None
    assert request.start_time <= span.start_time <= span.end_time <= request.end_time


def must_be_a_call_of_the_store(span: ReadableSpan, request: ReadableSpan) -> None:
    of = attributes_of(span)
    assert span.parent == request.context
    assert of == {
        names.DB_SYSTEM: "redis",
        names.DB_OPERATION: "EVALSHA",
        names.STORE_OPERATION: span.name.removeprefix("EVALSHA "),
    }
    assert span.name != "EVALSHA commit" or lasted_ns(span) > SLOW_COMMIT_NS
    must_lie_within(span, request)


def must_be_items(calls: list[ReadableSpan], rounds: list[ReadableSpan], world: World) -> None:
    ids = {span.context.span_id for span in rounds}
    for name, pool in ((names.PROPOSE, world.draft), (names.VERIFY, world.target)):
        of_pool = [span for span in calls if span.name == name]
        sent = {item.slice.traceparent for item in pool.calls}
        assert sent <= {traceparent_of(span.context) for span in of_pool}
        assert sent
        for span in of_pool:
            assert span.parent is not None
            assert span.parent.span_id in ids
            assert attributes_of(span) == {names.REPLICA: pool.address}
    assert len(calls) == sum(span.name in {names.PROPOSE, names.VERIFY} for span in calls)


async def test_a_round_links_to_its_verify_batch(world: World, kept: KeptSpans) -> None:
    def in_company(result: pb.VerifyResult) -> None:
        result.batch_span, result.batch_sessions, result.kv_reused = BATCH, 3, 5

    world.target.spoil = in_company
    must_be_true(await receive((await world.gateway_of(kept.parts())).generate()))
    [request] = await kept.requests()
    for span in kept.rounds(request):
        [link] = span.links
        assert dict(link.attributes or {}) == {names.LINK: names.LINK_BATCH}
        assert link.context.trace_id.to_bytes(16) + link.context.span_id.to_bytes(8) == BATCH
        assert (attributes_of(span)[names.BATCH_SESSIONS], attributes_of(span)[names.KV_REUSED]) == (3, 5)
    assert attributes_of(request)[names.CACHED_TOKENS] == 5


async def test_cached_tokens_are_at_most_the_prompt(world: World, kept: KeptSpans) -> None:
    def cached(result: pb.VerifyResult) -> None:
        result.kv_reused = 500

    world.target.spoil = cached
    await receive((await world.gateway_of(kept.parts())).generate())
    [request] = await kept.requests()
    assert attributes_of(request)[names.CACHED_TOKENS] == attributes_of(request)[names.INPUT_TOKENS] < 500


CHAT = (Message("user", PROMPT),)


async def test_a_trace_says_what_form_an_answer_has(world: World, kept: KeptSpans) -> None:
    gateway = await world.gateway_of(kept.parts())
    await receive(gateway.generate(regex="(?s:.*)", ignore_eos=False))
    [request] = await kept.requests()
    assert attributes_of(request)[names.GRAMMAR_KIND] == "regex"


async def test_traces_hold_no_content(world: World, kept: KeptSpans) -> None:
    received = await receive(
        (await world.gateway_of(kept.parts())).generate(CHAT, stop=["a stop string"], max_tokens=60)
    )
    [request] = await kept.requests()
    assert request.name == "chat tiny"
    everything = " ".join(span.to_json() for span in kept.spans)
    output = [PROMPT, "a stop string", *(received.text[at : at + 8] for at in range(0, 52, 8))]
    assert len(received.text) > 8
    assert [text for text in output if len(text) > 7 and text in everything] == []
    assert not any(
        name in everything for name in (names.ROUND_TEXT, names.INPUT_MESSAGES, names.OUTPUT_MESSAGES)
    )


async def test_traces_hold_content_if_enabled(world: World, kept: KeptSpans) -> None:
    gateway = await world.gateway_of(kept.parts(), trace_content=True)
    received = await receive(gateway.generate(CHAT, stop=["never said"], max_tokens=60))
    [request] = await kept.requests()
    facts = attributes_of(request)
    calls = [{"role": turn.role, "parts": [{"type": "text", "content": turn.content}]} for turn in CHAT]
    assert json.loads(facts[names.INPUT_MESSAGES]) == calls
    [answer] = json.loads(facts[names.OUTPUT_MESSAGES])
    assert answer["parts"] == [{"type": "text", "content": received.text}]
    assert answer["finish_reason"] == facts[names.FINISH_REASONS][0]
    assert facts[names.STOP_SEQUENCES] == ("never said",)
    texts = [text for span in kept.rounds(request) for text in attributes_of(span)[names.ROUND_TEXT]]
    assert len(texts) == len(received.tokens)
    assert "".join(texts) == received.text


@pytest.mark.parametrize("content", [False, True])
async def test_openinference_tells_no_more_than_the_conventions(
    world: World, kept: KeptSpans, monkeypatch: pytest.MonkeyPatch, content: bool
) -> None:
    monkeypatch.setenv("GALLEY_OPENINFERENCE", "true")
    gateway = await world.gateway_of(kept.parts(), trace_content=content)
    received = await receive(gateway.generate(CHAT, max_tokens=60))
    [request] = await kept.requests()
    facts = attributes_of(request)
    assert facts["openinference.span.kind"] == "LLM"
    assert facts["llm.token_count.total"] == facts[names.INPUT_TOKENS] + 60
    assert {attributes_of(span)["openinference.span.kind"] for span in kept.below(request)} == {"CHAIN"}
    told = {name: value for name, value in facts.items() if "message." in name or name.endswith(".value")}
    if not content:
        assert told == {}
        return
    assert told["output.value"] == told["llm.output_messages.0.message.content"] == received.text
    for index, turn in enumerate(CHAT):
        assert told[f"llm.input_messages.{index}.message.role"] == turn.role
        assert told[f"llm.input_messages.{index}.message.content"] == turn.content


@pytest.mark.parametrize(
    ("given", "every_round"),
    [
        ({"round_spans": "none"}, False),
        ({"round_spans": "slow", "slow_round_ms": 60_000}, False),
        # Not 0: of rounds whose verdicts came together, all but the first took no time.
        ({"round_spans": "slow", "slow_round_ms": -1}, True),
    ],
    ids=["none", "fast", "slow"],
)
async def test_round_spans_follow_the_setting(
    world: World, kept: KeptSpans, given: dict[str, object], every_round: bool
) -> None:
    gateway = await world.gateway_of(kept.parts(), credit=32, **given)
    world.target.preemptions_left = 1
    must_be_true(await receive(gateway.generate()))
    [request] = await kept.requests()
    kept.must_hang_together(request)
    facts = attributes_of(request)
    assert len(kept.rounds(request)) == (facts[names.ROUNDS] if every_round else 0)
    assert facts[names.SLOWEST_ROUND_NS] > 0
    calls = [span for span in kept.below(request) if span.kind is SpanKind.CLIENT]
    assert {names.VERIFY, names.PROPOSE} <= {span.name for span in calls}
    assert all(span.parent == request.context for span in calls)
    [missed] = kept.events(request, names.KV_MISSED)
    assert missed[names.POOL] == "target"
    assert missed[names.HAVE] > 0
    on_request = [event.name for event in request.events]
    assert (names.KV_MISSED in on_request) != every_round


async def test_a_forced_request_is_traced(
    world: World, kept: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    gateway = await world.gateway_of(kept.parts())
    must_be_true(await receive(gateway.generate()))
    await gateway.idle()
    assert kept.spans == []
    plain = {item.slice.traceparent for item in [*world.target.calls, *world.draft.calls]}
    assert len(plain) == 1, "the replicas are told that nobody wants to know"
    assert plain.pop().endswith("-00")
    world.target.calls.clear()
    must_be_true(await receive(gateway.generate(force_trace=True)))
    [request] = await kept.requests()
    assert attributes_of(request)[names.FORCED] is True
    assert len(kept.rounds(request)) == attributes_of(request)[names.ROUNDS]
    assert all(item.slice.traceparent.endswith("-01") for item in world.target.calls)


CALLER = SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


async def test_a_request_belongs_to_its_callers_trace(world: World, kept: KeptSpans) -> None:
    gateway = await world.gateway_of(kept.parts())
    with trace.use_span(trace.NonRecordingSpan(CALLER)):
        stream = gateway.generate()
    must_be_true(await receive(stream))
    [request] = await kept.requests()
    assert request.parent is not None
    assert (request.context.trace_id, request.parent.span_id) == (CALLER.trace_id, CALLER.span_id)
    assert {item.slice.traceparent.split("-")[1] for item in world.target.calls} == {f"{0xABC:032x}"}


@pytest.mark.parametrize(
    "metadata", [("traceparent", "nonsense"), ("traceparent", f"00-{0:032x}-{0:016x}-01")]
)
async def test_an_invalid_traceparent_begins_a_new_trace(
    world: World, kept: KeptSpans, metadata: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("galley.client.client.w3c_metadata", lambda: (metadata,))
    must_be_true(await receive((await world.gateway_of(kept.parts())).generate()))
    [request] = await kept.requests()
    assert request.parent is None
    assert request.context.is_valid

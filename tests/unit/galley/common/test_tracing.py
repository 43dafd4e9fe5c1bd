"""Sampling, packed ids, and the spans of requests."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Decision, ParentBased, Sampler

from galley.common.tracing.exporting import GalleySampler
from galley.common.tracing.item_spans import ItemSpan, is_sampled
from galley.common.tracing.light_spans import follows_sampled_parents, names_a_span, packed, unpacked
from galley.common.tracing.telemetry import context_from
from galley.core import names
from galley.core.content import Miss
from galley.core.errors import InvalidField, Unavailable
from galley.core.scheduler.messages import Superseded
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.spans import KeptSpans, attributes_of, context_of, root

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
UNSAMPLED = SAMPLED[:-1] + "0"
NONSENSE = "1" * len(SAMPLED)
NO_TRACE = f"00-{0:032x}-{SPAN_ID}-01"
NO_PARENT = f"00-{TRACE_ID}-{0:016x}-01"


@pytest.fixture
def kept() -> KeptSpans:
    return KeptSpans()


def span_of(kept: KeptSpans, parent: str) -> ItemSpan:
    return ItemSpan(kept.scope, "x", "target", pb.SessionSlice(traceparent=parent, session_id="s", start=3))


@pytest.mark.parametrize("parent", [SAMPLED, SAMPLED[:-2] + "03", f"01{SAMPLED[2:]}-more"])
def test_a_sampled_traceparent_starts_a_span(kept: KeptSpans, parent: str) -> None:
    item = span_of(kept, parent)
    assert item.span is not None
    assert item.log_span is item.span
    item.end()
    [span] = kept.named("x")
    assert trace.format_trace_id(context_of(span)[0]) == TRACE_ID
    assert span.parent is not None
    assert (trace.format_span_id(span.parent.span_id), span.parent.is_remote) == (SPAN_ID, True)
    assert dict(attributes_of(span)) == {
        "rpc.system": "grpc",
        "galley.session.id": "s",
        "galley.outcome": "cancelled",
    }


@pytest.mark.parametrize("parent", [UNSAMPLED, NONSENSE, NO_TRACE, NO_PARENT, "0"])
def test_other_traceparents_start_no_span(kept: KeptSpans, parent: str) -> None:
    item = span_of(kept, parent)
    assert item.span is None
    item.failed(Unavailable("gone"))
    item.answered(Miss(0, b""))
    item.end()
    assert kept.named("x") == []
    caller = trace.get_current_span(None) if parent != UNSAMPLED else item.log_span
    assert item.log_span.get_span_context().is_valid == (parent == UNSAMPLED)
    assert not caller.is_recording()


def test_a_request_without_traceparent_joins_the_span_of_its_call(kept: KeptSpans) -> None:
    call = root(kept.scope, "call")
    with trace.use_span(call):
        item = span_of(kept, "")
        assert item.span is not None
        assert (item.span.trace_id, item.span.parent_id) == (call.trace_id, call.span_id)
        assert not item.span.has_remote_parent
        assert span_of(kept, UNSAMPLED).span is None
    assert span_of(kept, "").span is None
    assert ItemSpan(None, "x", "target", pb.SessionSlice(traceparent=SAMPLED)).span is None


def test_the_sampler_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    assert span_of(KeptSpans(), SAMPLED).span is None
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    assert span_of(KeptSpans(), SAMPLED).span is not None


@pytest.mark.parametrize(
    ("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)]
)
def test_the_flags_decide_whether_a_traceparent_is_sampled(flags: str, sampled: bool) -> None:
    assert is_sampled(SAMPLED[:-2] + flags) == sampled


@pytest.mark.parametrize(
    ("error", "kind"),
    [(InvalidField("k", "no"), "invalid_argument"), (Unavailable("gone"), "unavailable")],
)
def test_a_failed_request_has_an_error_type(kept: KeptSpans, error: Exception, kind: str) -> None:
    item = span_of(kept, SAMPLED)
    item.failed(error)
    item.end()
    [span] = kept.named("x")
    assert attributes_of(span)["error.type"] == kind
    assert attributes_of(span)["galley.outcome"] == "error"
    assert not span.status.is_unset


@pytest.mark.parametrize(
    ("outcome", "preempted", "named", "events"),
    [
        (object(), False, "result", {}),
        (Superseded(5, b""), False, "superseded", {}),
        (Miss(2, b""), False, "cache_miss", {"kv.missed": {"galley.have": 2, "galley.expected": 3}}),
        (Miss(2, b""), True, "cache_miss", {"kv.preempted": {"galley.have": 2}}),
    ],
)
def test_the_outcome_of_a_request_is_recorded(
    kept: KeptSpans, outcome: object, preempted: bool, named: str, events: dict[str, dict[str, int]]
) -> None:
    item = span_of(kept, SAMPLED)
    item.answered(outcome, preempted=preempted)
    item.end()
    [span] = kept.named("x")
    assert attributes_of(span)["galley.outcome"] == named
    assert {event.name: dict(event.attributes or {}) for event in span.events} == {
        name: {"galley.pool": "target"} | facts for name, facts in events.items()
    }


PACKED = packed(int(TRACE_ID, 16), int(SPAN_ID, 16))


def test_ids_are_unpacked_as_they_were_packed() -> None:
    assert len(PACKED) == 24
    assert names_a_span(PACKED)
    context = unpacked(PACKED)
    assert (context.trace_id, context.span_id) == (int(TRACE_ID, 16), int(SPAN_ID, 16))
    assert context.is_remote
    assert context.trace_flags.sampled


@pytest.mark.parametrize("wrong", [b"", PACKED[:-1], PACKED + b"x", bytes(24), packed(1, 0), packed(0, 1)])
def test_other_bytes_are_no_ids(wrong: bytes) -> None:
    assert not names_a_span(wrong)
    assert not unpacked(wrong).is_valid


NEVER, ALWAYS = ParentBased(ALWAYS_OFF), ParentBased(ALWAYS_ON)
ROOT, CHILD, UNSAMPLED_CHILD = Context(), context_from(SAMPLED), context_from(UNSAMPLED)


def samples(inner: Sampler, parent: Context = ROOT, attributes: dict[str, bool] | None = None) -> bool:
    kind, sampler = trace.SpanKind.SERVER, GalleySampler(inner)
    result = sampler.should_sample(parent, 5, names.TEXT_COMPLETION, kind, attributes)
    return result.decision is Decision.RECORD_AND_SAMPLE


@pytest.mark.parametrize("parent", [ROOT, CHILD, UNSAMPLED_CHILD])
def test_forced_requests_are_sampled(parent: Context) -> None:
    assert samples(NEVER, parent, attributes={names.FORCED: True})
    assert not samples(NEVER, UNSAMPLED_CHILD, attributes={names.FORCED: False})


def test_other_requests_are_sampled_as_the_environment_says() -> None:
    assert [samples(NEVER, parent) for parent in (ROOT, CHILD, UNSAMPLED_CHILD)] == [False, True, False]
    assert [samples(ALWAYS, parent) for parent in (ROOT, CHILD, UNSAMPLED_CHILD)] == [True, True, False]


@pytest.mark.parametrize(
    ("variable", "follows"),
    [
        ("parentbased_always_on", True),
        ("parentbased_always_off", True),
        ("parentbased_traceidratio", True),
        ("always_on", False),
        ("always_off", False),
        ("traceidratio", False),
    ],
)
def test_samplers_that_follow_sampled_parents_are_known_by_their_description(
    monkeypatch: pytest.MonkeyPatch, variable: str, follows: bool
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", variable)
    sampler = GalleySampler(TracerProvider(shutdown_on_exit=False).sampler)
    assert follows_sampled_parents(sampler) == follows
    inner = ParentBased(ALWAYS_ON, remote_parent_sampled=ALWAYS_OFF)
    assert not follows_sampled_parents(GalleySampler(inner))

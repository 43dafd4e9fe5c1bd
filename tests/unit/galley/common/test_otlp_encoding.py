"""Our encoder says what the SDK's does, of any span of ours."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState

from galley.common.tracing.light_spans import LeanSpan, SpanScope, readable
from galley.common.tracing.otlp_encoding import encoded
from galley.common.tracing.span_names import packed

RESOURCES = [Resource({"service.name": "a", "n": 1}, "https://example.org"), Resource({})]
SCOPES = [InstrumentationScope("s", "1", "https://example.org/1"), InstrumentationScope("t")]


def scope_of(resource: Resource, scope: InstrumentationScope) -> SpanScope:
    return SpanScope(TracerProvider(resource=resource, shutdown_on_exit=False), scope, lambda _: None)


PLAIN = scope_of(RESOURCES[1], SCOPES[0])
scopes = st.sampled_from([scope_of(resource, scope) for resource in RESOURCES for scope in SCOPES])
texts = st.text(max_size=200)
wholes = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 3000),
    st.sampled_from([2**bits + more for bits in range(7, 63, 7) for more in (-1, 0, 1)]),
)
scalars = st.one_of(
    texts, st.booleans(), wholes, st.floats(allow_nan=False), st.binary(max_size=20), st.none()
)
values = st.one_of(scalars, st.lists(scalars, max_size=4), st.dictionaries(texts, scalars, max_size=3))
attributes = st.dictionaries(texts, values, max_size=30)
times = st.integers(0, 2**63)
states = st.sampled_from([None, TraceState(), TraceState([("a", "1"), ("b", "2")])])
contexts = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.just(TraceFlags(1)),
    states,
)


@st.composite
def spans(draw: Any) -> LeanSpan:
    names = tuple(draw(st.lists(st.text("xyz", min_size=1), unique=True, max_size=16)))
    span: LeanSpan = draw(scopes).begin(
        draw(texts),
        draw(st.sampled_from(SpanKind)),
        draw(st.integers(1, 2**128 - 1)),
        draw(st.integers(1, 2**64 - 1)),
        draw(st.integers(0, 2**64 - 1)),
        draw(times),
    )
    span.trace_state = draw(states)
    span.has_remote_parent = bool(span.parent_id) and draw(st.booleans())
    span.attributes = {key: value for key, value in draw(attributes).items() if key not in names}
    span.numbers = names, tuple(draw(wholes) for _ in names)
    for name in draw(st.lists(texts, max_size=3)):
        span.add_event(name, draw(attributes), draw(times))
    for context in draw(st.lists(contexts, max_size=3)):
        span.add_link(context, draw(attributes))
    span.link_to([packed(to.trace_id, to.span_id) for to in draw(st.lists(contexts, max_size=2))], {"a": 1})
    span.failed = draw(st.booleans())
    span.end(draw(times))
    return span


@settings(max_examples=60, deadline=None)
@given(st.lists(spans(), max_size=5))
def test_any_spans(some: list[LeanSpan]) -> None:
    for spans in ([span] for span in some):
        assert read(spans) == by_the_sdk(spans)
    assert _by_scope(read(some)) == _by_scope(by_the_sdk(some))


def read(spans: list[LeanSpan]) -> ExportTraceServiceRequest:
    return ExportTraceServiceRequest.FromString(encoded(spans))


def by_the_sdk(spans: list[LeanSpan]) -> ExportTraceServiceRequest:
    return encode_spans([readable(span) for span in spans])


def _by_scope(request: ExportTraceServiceRequest) -> list[tuple[str, str, list[bytes]]]:
    """Of each process and scope its spans; ours says the process again with each scope."""
    return sorted(
        (
            str(resource.resource),
            str(scope.scope),
            [span.SerializeToString(deterministic=True) for span in scope.spans],
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
    )


def test_more_events_and_links_than_a_span_may_have() -> None:
    span = span_of({})
    for number in range(200):
        span.add_event(f"event {number}", None, number)
    span.link_to([SpanContext(7, 1 + number, is_remote=True) for number in range(150)], {"to": "it"})
    span.add_link(SpanContext(7, 999, is_remote=True))
    span.end(1)
    [sent] = read([span]).resource_spans[0].scope_spans[0].spans
    assert (len(sent.events), sent.dropped_events_count, sent.events[-1].name) == (128, 72, "event 199")
    assert (len(sent.links), sent.dropped_links_count) == (128, 23)
    assert sent.links[-1].span_id == (999).to_bytes(8)
    assert read([span]) == by_the_sdk([span])


def test_a_number_that_cannot_be_said_is_left_out() -> None:
    span = span_of({"a": 2**63, "b": -(2**63) - 1, "c": 2**63 - 1})
    [sent] = read([span]).resource_spans[0].scope_spans[0].spans
    assert [(entry.key, entry.value.int_value) for entry in sent.attributes] == [("c", 2**63 - 1)]


def test_a_span_that_cannot_be_said_keeps_no_other_back(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: LeanSpan) -> None:
        raise RuntimeError("cannot be told")

    odd, broken, good = span_of({"a": object()}), span_of({}), span_of({"a": 1})
    broken.tell = fail
    [resource] = read([odd, broken, good]).resource_spans
    [sent] = resource.scope_spans[0].spans
    assert sent.span_id == good.span_id.to_bytes(8)
    assert [record.getMessage() for record in caplog.records] == ["a span cannot be said: x"] * 2


def span_of(told: dict[str, Any]) -> LeanSpan:
    span = PLAIN.root("x", 1)
    span.attributes = told
    return span

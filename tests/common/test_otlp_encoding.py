"""Our encoder says what the SDK's does, of any span."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from services.common.otlp_encoding import encoded

RESOURCES = [Resource({"service.name": "a", "n": 1}, "https://example.org"), Resource({})]
SCOPES = [InstrumentationScope("s", "1", "https://example.org/1"), InstrumentationScope("t"), None]

texts = st.text(max_size=200)
scalars = st.one_of(
    texts,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 3000),
    st.floats(allow_nan=False),
    st.binary(max_size=20),
    st.none(),
)
values = st.one_of(scalars, st.lists(scalars, max_size=4), st.dictionaries(texts, scalars, max_size=3))
attributes = st.dictionaries(texts, values, max_size=30)
times = st.integers(0, 2**63)
contexts = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.just(TraceFlags(1)),
    st.sampled_from([TraceState(), TraceState([("a", "1"), ("b", "2")])]),
)
events = st.builds(Event, texts, attributes, times)
spans = st.builds(
    ReadableSpan,
    texts,
    contexts,
    st.one_of(st.none(), contexts),
    st.sampled_from(RESOURCES),
    attributes,
    st.lists(events, max_size=3),
    st.lists(st.builds(Link, contexts, attributes), max_size=3),
    st.sampled_from(SpanKind),
    status=st.sampled_from([Status(), Status(StatusCode.OK), Status(StatusCode.ERROR, "why")]),
    start_time=times,
    end_time=times,
    instrumentation_scope=st.sampled_from(SCOPES),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(spans, max_size=5))
def test_any_spans(some: list[ReadableSpan]) -> None:
    for spans in ([span] for span in some):
        assert ExportTraceServiceRequest.FromString(encoded(spans)) == encode_spans(spans)
    assert _by_scope(ExportTraceServiceRequest.FromString(encoded(some))) == _by_scope(encode_spans(some))


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


def test_spans_of_the_sdk_with_more_than_they_may_have() -> None:
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("test", "1")
    with tracer.start_as_current_span("outer") as span:
        span.set_attributes({f"key {number}": number for number in range(200)})
        span.add_event("happened", {"ranks": [1, 2, 3]})
        with tracer.start_as_current_span("inner", links=[Link(span.get_span_context())]):
            pass
    found = kept.get_finished_spans()
    assert found[1].dropped_attributes > 0
    assert ExportTraceServiceRequest.FromString(encoded(found)) == encode_spans(found)


def test_a_number_that_cannot_be_said_is_left_out() -> None:
    kept: dict[str, Any] = {"a": 2**63, "b": -(2**63) - 1, "c": 2**63 - 1}
    span = ReadableSpan("x", SpanContext(1, 2, is_remote=False), resource=RESOURCES[1], attributes=kept)
    [resource] = ExportTraceServiceRequest.FromString(encoded([span])).resource_spans
    [sent] = resource.scope_spans[0].spans
    assert [(entry.key, entry.value.int_value) for entry in sent.attributes] == [("c", 2**63 - 1)]

"""When an item is traced, and how its span is named in a message."""

from __future__ import annotations

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from services.common.item_spans import ItemSpan, is_sampled, packed, unpacked
from services.core.errors import InvalidField, Unavailable

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
UNSAMPLED = SAMPLED[:-1] + "0"
NONSENSE = "1" * len(SAMPLED)


@pytest.fixture
def tracer() -> trace.Tracer:
    return TracerProvider(shutdown_on_exit=False).get_tracer("test")


def span_of(tracer: trace.Tracer, parent: str) -> ItemSpan:
    return ItemSpan(tracer, "x", parent, "s")


def test_an_item_is_traced_by_its_own_traceparent_or_with_its_call(tracer: trace.Tracer) -> None:
    traced = span_of(tracer, SAMPLED)
    assert traced.traced
    assert trace.format_trace_id(traced.span.get_span_context().trace_id) == TRACE_ID
    assert traced.link is not None
    assert traced.link.context == traced.span.get_span_context()
    for parent in (UNSAMPLED, NONSENSE, "", "0"):
        untraced = span_of(tracer, parent)
        assert not untraced.traced
        assert untraced.link is None
    with tracer.start_as_current_span("call") as call:
        assert span_of(tracer, "").span.get_span_context().trace_id == call.get_span_context().trace_id
        assert not span_of(tracer, UNSAMPLED).traced
    assert not span_of(trace.NoOpTracer(), SAMPLED).traced


@pytest.mark.parametrize(
    ("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)]
)
def test_the_flag_alone_says_whether_a_traceparent_is_sampled(flags: str, sampled: bool) -> None:
    assert is_sampled(SAMPLED[:-2] + flags) == sampled


def test_a_span_comes_back_from_its_name_in_a_message(tracer: trace.Tracer) -> None:
    context = tracer.start_span("x").get_span_context()
    name = packed(context)
    assert len(name) == 24
    found = unpacked(name)
    assert (found.trace_id, found.span_id) == (context.trace_id, context.span_id)
    assert found.is_remote
    assert found.trace_flags.sampled
    for wrong in (b"", name[:-1], name + b"x", bytes(24)):
        assert not unpacked(wrong).is_valid


@pytest.mark.parametrize(
    ("error", "kind"),
    [(InvalidField("k", "no"), "invalid_argument"), (Unavailable("gone"), "unavailable")],
)
def test_a_refused_item_says_why(tracer: trace.Tracer, error: Exception, kind: str) -> None:
    item = span_of(tracer, SAMPLED)
    item.failed(error)
    item.close({"a": 1})
    span = item.span
    assert isinstance(span, trace.Span)
    attributes = dict(getattr(span, "attributes"))  # noqa: B009  # of the SDK's span
    assert attributes["error.type"] == kind
    assert attributes["galley.outcome"] == "error"
    assert attributes["galley.session.id"] == "s"
    assert not span.is_recording()

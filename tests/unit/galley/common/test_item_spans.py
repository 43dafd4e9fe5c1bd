"""When an item is traced, and what its span says."""

from __future__ import annotations

import pytest
from opentelemetry import trace

from galley.common.tracing.item_spans import ItemSpan, is_sampled
from galley.core.errors import InvalidField, Unavailable
from tests.fakes.spans import KeptSpans, attributes_of, context_of

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
    return ItemSpan(kept.scope, "x", parent, "s")


@pytest.mark.parametrize("parent", [SAMPLED, SAMPLED[:-2] + "03", f"01{SAMPLED[2:]}-more"])
def test_an_item_is_traced_by_its_own_traceparent(kept: KeptSpans, parent: str) -> None:
    item = span_of(kept, parent)
    assert item.span is not None
    assert item.log_span is item.span
    item.close(lambda span: span.attributes.update(told="late"))
    [span] = kept.named("x")
    assert trace.format_trace_id(context_of(span)[0]) == TRACE_ID
    assert span.parent is not None
    assert (trace.format_span_id(span.parent.span_id), span.parent.is_remote) == (SPAN_ID, True)
    assert dict(attributes_of(span)) == {
        "rpc.system": "grpc",
        "galley.session.id": "s",
        "galley.outcome": "cancelled",
        "told": "late",
    }


@pytest.mark.parametrize("parent", [UNSAMPLED, NONSENSE, NO_TRACE, NO_PARENT, "0"])
def test_no_other_item_is_traced(kept: KeptSpans, parent: str) -> None:
    item = span_of(kept, parent)
    assert item.span is None
    item.failed(Unavailable("gone"))
    item.close(lambda _: pytest.fail("nothing is to be told"))
    assert kept.named("x") == []
    caller = trace.get_current_span(None) if parent != UNSAMPLED else item.log_span
    assert item.log_span.get_span_context().is_valid == (parent == UNSAMPLED)
    assert not caller.is_recording()


def test_an_item_without_a_traceparent_is_traced_with_its_call(kept: KeptSpans) -> None:
    call = kept.scope.root("call", 1)
    with trace.use_span(call):
        item = span_of(kept, "")
        assert item.span is not None
        assert (item.span.trace_id, item.span.parent_id) == (call.trace_id, call.span_id)
        assert not item.span.has_remote_parent
        assert span_of(kept, UNSAMPLED).span is None
    assert span_of(kept, "").span is None
    assert ItemSpan(None, "x", SAMPLED, "s").span is None


def test_a_sampler_that_keeps_nothing_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    assert span_of(KeptSpans(), SAMPLED).span is None
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_on")
    assert span_of(KeptSpans(), SAMPLED).span is not None


@pytest.mark.parametrize(
    ("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)]
)
def test_the_flag_alone_says_whether_a_traceparent_is_sampled(flags: str, sampled: bool) -> None:
    assert is_sampled(SAMPLED[:-2] + flags) == sampled


@pytest.mark.parametrize(
    ("error", "kind"),
    [(InvalidField("k", "no"), "invalid_argument"), (Unavailable("gone"), "unavailable")],
)
def test_a_refused_item_says_why(kept: KeptSpans, error: Exception, kind: str) -> None:
    item = span_of(kept, SAMPLED)
    item.failed(error)
    item.close(lambda _: None)
    [span] = kept.named("x")
    assert attributes_of(span)["error.type"] == kind
    assert attributes_of(span)["galley.outcome"] == "error"
    assert not span.status.is_unset

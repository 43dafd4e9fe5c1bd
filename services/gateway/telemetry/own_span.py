"""The span of one request, and how others are made beneath it."""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry import context as current
from opentelemetry import trace
from opentelemetry.trace import SpanContext, SpanKind
from opentelemetry.util.types import AnyValue, Attributes

from galley.common.tracing.light_spans import LeanSpan, SpanScope, Tell
from galley.common.tracing.telemetry import traceparent_of
from galley.core.session.ports import Clock
from services.gateway.telemetry.round_spans import TraceOptions

_ID_AT = len("00-") + 32 + len("-")
"""Where the span id stands in a traceparent."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A call that has come. `context` is its span's, `parent` what it names as that span's, if anything.

    `offset_ns` is what the clock is behind Unix time, and `start_ns` when the call came, in Unix time.
    """

    scope: SpanScope
    options: TraceOptions
    context: SpanContext
    parent: SpanContext | None
    clock: Clock
    offset_ns: int
    start_ns: int
    attributes: dict[str, AnyValue] = field(default_factory=dict)

    def now_ns(self) -> int:
        """Unix time, as far as the clock tells it."""
        return self.clock.now_ns() + self.offset_ns


class RequestSpan:
    """Of a request that is sampled. Times are Unix nanoseconds."""

    def __init__(self, begun: Begun, span: trace.Span) -> None:
        """From now on `span` is the current one."""
        self.span = span
        self.context = span.get_span_context()
        self.traceparent = traceparent_of(self.context)
        self.clock_ns = begun.clock.now_ns
        self.offset_ns = begun.offset_ns
        self.new_id = begun.scope.new_span_id
        self._begin = begun.scope.begin
        self._trace_id, self._id = self.context.trace_id, self.context.span_id
        self._state = self.context.trace_state
        self._named = self.traceparent[:_ID_AT]
        current.attach(trace.set_span_in_context(span))  # each call runs in a context of its own

    def now_ns(self) -> int:
        """Unix time, as far as the clock tells it."""
        return self.clock_ns() + self.offset_ns

    def event(self, name: str, attributes: Attributes = None, at_ns: int | None = None) -> None:
        """Of the request."""
        self.span.add_event(name, attributes, self.now_ns() if at_ns is None else at_ns)

    def child(
        self,
        name: str,
        start_ns: int,
        *,
        span_id: int = 0,
        parent_id: int = 0,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: dict[str, AnyValue] | None = None,
        tell: Tell | None = None,
    ) -> LeanSpan:
        """A span beneath this one, or beneath `parent_id`; `span_id` is its own if that is known already."""
        span_id = span_id or self.new_id()
        span = self._begin(
            name, kind, self._trace_id, span_id, parent_id or self._id, start_ns, tell, attributes
        )
        if self._state:
            span.trace_state = self._state
        return span

    def named(self, span: LeanSpan) -> str:
        """The traceparent of a span beneath this one."""
        return f"{self._named}{span.span_id:016x}-01"

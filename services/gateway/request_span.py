"""The span of one request, and how others are made beneath it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry import context as current
from opentelemetry import trace
from opentelemetry.trace import SpanKind

from services.common.telemetry import traceparent_of

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext
    from opentelemetry.util.types import AnyValue, Attributes

    from services.common.lean_spans import LeanSpan, SpanScope
    from services.core.ports import Clock
    from services.gateway.round_spans import TraceOptions


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

    def at(self, clock_ns: int) -> int:
        """Unix time of a time of the clock."""
        return clock_ns + self.offset_ns


class RequestSpan:
    """Of a request that is sampled. Times are Unix nanoseconds."""

    def __init__(self, begun: Begun, span: trace.Span) -> None:
        """From now on `span` is the current one."""
        self.span = span
        self.context = span.get_span_context()
        self.traceparent = traceparent_of(self.context)
        self.now_ns = begun.now_ns
        self.at = begun.at
        self._scope = begun.scope
        current.attach(trace.set_span_in_context(span))  # each call runs in a context of its own

    def event(self, name: str, attributes: Attributes = None, at_ns: int | None = None) -> None:
        """Of the request."""
        self.span.add_event(name, attributes, self.now_ns() if at_ns is None else at_ns)

    def new_context(self) -> SpanContext:
        """Of a span that will be made beneath this one, to be named before."""
        return self._scope.beneath(self.context)

    def child(
        self,
        name: str,
        start_ns: int,
        *,
        context: SpanContext | None = None,
        parent: SpanContext | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: dict[str, AnyValue] | None = None,
    ) -> LeanSpan:
        """A span beneath this one, or beneath `parent`; `context` is as `new_context` told it."""
        return self._scope.span(
            name,
            context or self.new_context(),
            parent or self.context,
            start_ns,
            self.now_ns,
            kind=kind,
            attributes=attributes,
        )

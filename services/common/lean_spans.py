"""Spans that cost little: what a stream of rounds can afford for each of them, and an exporter can send.

The SDK's spans are safe from any thread, and check whatever they are told. These belong to one event loop,
are told what is right, and are made for sampled requests alone. Their ids may be known before they begin:
what is asked in a round names it as its parent.

Imports the SDK: to be imported where traces are on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.util.types import AnyValue, Attributes

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSAMPLED = TraceFlags(TraceFlags.DEFAULT)
_UNSET = Status(StatusCode.UNSET)
_ERROR = Status(StatusCode.ERROR)
_MOST = 128
"""Events, and links, of one span: the last of them, as by the SDK's default; how many there were is told."""


@dataclass(frozen=True, slots=True)
class SpanScope:
    """What the spans of one part of a process share, and `export`, which takes those that have ended."""

    provider: TracerProvider
    scope: InstrumentationScope
    export: Callable[[ReadableSpan], None]

    @property
    def resource(self) -> Resource:
        """The process."""
        return self.provider.resource

    def request(self, parent: Context, name: str, attributes: Mapping[str, AnyValue]) -> SpanContext:
        """Of a server's span beneath `parent`, if that names one; the sampler is told the attributes."""
        above = trace.get_current_span(parent).get_span_context()
        ids = self.provider.id_generator
        trace_id = above.trace_id if above.is_valid else ids.generate_trace_id()
        result = self.provider.sampler.should_sample(parent, trace_id, name, SpanKind.SERVER, attributes)
        flags = _SAMPLED if result.decision is Decision.RECORD_AND_SAMPLE else _UNSAMPLED
        return _context(trace_id, ids.generate_span_id(), flags, result.trace_state)

    def beneath(self, parent: SpanContext) -> SpanContext:
        """Of a new span whose parent is sampled."""
        span_id = self.provider.id_generator.generate_span_id()
        return _context(parent.trace_id, span_id, _SAMPLED, parent.trace_state)

    @staticmethod
    def sampled(context: SpanContext) -> SpanContext:
        """The same, sampled."""
        return _context(context.trace_id, context.span_id, _SAMPLED, context.trace_state)

    def span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_ns: int,
        now_ns: Callable[[], int],
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: dict[str, AnyValue] | None = None,
    ) -> LeanSpan:
        """Begun at `start_ns`; `attributes` is kept and added to. All times are Unix nanoseconds."""
        kept = {} if attributes is None else attributes
        return LeanSpan(self, name, context, parent, start_ns, now_ns, kind=kind, attributes=kept)


def _context(trace_id: int, span_id: int, flags: TraceFlags, state: TraceState | None) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=flags, trace_state=state)


class LeanSpan(trace.NonRecordingSpan):
    """A span under way; only where it says otherwise does it differ from what the API promises.

    It keeps no exceptions: their messages may tell what a session is about.
    """

    def __init__(  # noqa: PLR0913  # what a span is made of
        self,
        scope: SpanScope,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start_ns: int,
        now_ns: Callable[[], int],
        *,
        kind: SpanKind,
        attributes: dict[str, AnyValue],
    ) -> None:
        """See `SpanScope.span`."""
        super().__init__(context)
        self.name = name
        self.attributes = attributes
        self._scope = scope
        self._parent = parent
        self._start_ns = start_ns
        self._now_ns = now_ns
        self._kind = kind
        self._links: Sequence[trace.Link] = ()
        self._events: Sequence[Event] = ()
        self._status = _UNSET
        self._ended = False

    def is_recording(self) -> bool:
        """Until it has ended."""
        return not self._ended

    def set_attribute(self, key: str, value: AnyValue) -> None:
        """Unchecked; nothing once it has ended."""
        if not self._ended:
            self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AnyValue]) -> None:
        """Unchecked; nothing once it has ended."""
        if not self._ended:
            self.attributes.update(attributes)

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        """Unchecked."""
        if not isinstance(self._events, BoundedList):
            self._events = BoundedList(_MOST)
        self._events.append(Event(name, attributes, self._now_ns() if timestamp is None else timestamp))

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """Unchecked."""
        if not isinstance(self._links, BoundedList):
            self._links = BoundedList(_MOST)
        self._links.append(trace.Link(context, attributes))

    def update_name(self, name: str) -> None:
        """Until it has ended."""
        self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:  # noqa: ARG002
        """That of an error stays; what it says in words is left out."""
        code = status.status_code if isinstance(status, Status) else status
        if code is StatusCode.ERROR:
            self._status = _ERROR

    def end(self, end_time: int | None = None) -> None:
        """Hand it over; once."""
        if self._ended:
            return
        self._ended = True
        self._scope.export(
            ReadableSpan(
                name=self.name,
                context=self._context,
                parent=self._parent,
                resource=self._scope.resource,
                attributes=self.attributes,
                events=self._events,
                links=self._links,
                kind=self._kind,
                status=self._status,
                start_time=self._start_ns,
                end_time=self._now_ns() if end_time is None else end_time,
                instrumentation_scope=self._scope.scope,
            )
        )

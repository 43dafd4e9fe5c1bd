"""Light spans: cheaper to record than the SDK's, which lock, check and copy every attribute.

A light span belongs to one event loop until it ends, and exists only for sampled requests. It stores what it
is given unchecked; ids are integers. Attributes that must be computed are set by the exporting thread (see
`Completer`), which also turns it into the SDK's `ReadableSpan`.

Imports the SDK: import this module only where traces are on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from random import getrandbits
from typing import Protocol, TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AnyValue, Attributes

from galley.common.tracing.sampling import follows_sampled_parents
from galley.common.tracing.span_names import unpacked

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSAMPLED = TraceFlags(TraceFlags.DEFAULT)
_MAX_EVENTS = 128
"""Events, and links, of one span: the last ones are kept and the others counted, as in the SDK."""


class Named(Protocol):
    """The target of a link: a light span or a span context."""

    @property
    def trace_id(self) -> int: ...  # noqa: D102
    @property
    def span_id(self) -> int: ...  # noqa: D102
    @property
    def is_remote(self) -> bool: ...  # noqa: D102


Linked: TypeAlias = "tuple[Named | bytes, Attributes]"
"""A link; bytes are the packed ids of another process's span (`galley.common.tracing.span_names`)."""
Completer: TypeAlias = "Callable[[LightSpan], None]"
"""Sets attributes and links of a span that has ended, in the exporting thread."""


class SpanScope:
    """Make the spans of one instrumentation scope; `export` takes those that have ended."""

    def __init__(
        self, provider: TracerProvider, scope: InstrumentationScope, export: Callable[[LightSpan], None]
    ) -> None:
        self.provider = provider
        self.scope = scope
        self.export = export
        self.new_trace_id: Callable[[], int] = provider.id_generator.generate_trace_id
        self.new_span_id = _span_ids(provider.id_generator)
        self.begin = partial(LightSpan, self)
        self._follows = follows_sampled_parents(provider.sampler)

    @property
    def resource(self) -> Resource:
        """Return the resource of the process."""
        return self.provider.resource

    def request(self, parent: Context, name: str, attributes: Mapping[str, AnyValue]) -> SpanContext:
        """Return the context of a new server span below `parent`; the sampler sees the attributes."""
        above = trace.get_current_span(parent).get_span_context()
        trace_id = above.trace_id if above.is_valid else self.new_trace_id()
        result = self.provider.sampler.should_sample(parent, trace_id, name, SpanKind.SERVER, attributes)
        flags = _SAMPLED if result.decision is Decision.RECORD_AND_SAMPLE else _UNSAMPLED
        return _context(trace_id, self.new_span_id(), flags, result.trace_state)

    def keeps(self, name: str, trace_id: int, parent_id: int) -> bool:
        """Return True if a server span below a sampled remote span is sampled."""
        if self._follows:
            return True
        caller = trace.NonRecordingSpan(_context(trace_id, parent_id, _SAMPLED, None, is_remote=True))
        context = trace.set_span_in_context(caller, Context())
        result = self.provider.sampler.should_sample(context, trace_id, name, SpanKind.SERVER)
        return result.decision is Decision.RECORD_AND_SAMPLE

    @staticmethod
    def sampled(context: SpanContext) -> SpanContext:
        """Return the context with the sampled flag."""
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
    ) -> LightSpan:
        """Start the span of `context`; it keeps and extends `attributes`. Times are Unix nanoseconds."""
        ids = context.trace_id, context.span_id, 0 if parent is None else parent.span_id
        span = self.begin(name, kind, *ids, start_ns, None, attributes)
        span.trace_state = context.trace_state
        span.has_remote_parent = parent is not None and parent.is_remote
        span.now_ns = now_ns
        return span

    def root(self, name: str, start_ns: int, completer: Completer | None = None) -> LightSpan:
        """Start a span in a trace of its own."""
        ids = self.new_trace_id(), self.new_span_id(), 0
        return self.begin(name, SpanKind.INTERNAL, *ids, start_ns, completer)


def _span_ids(generator: IdGenerator) -> Callable[[], int]:
    """Return the generator of span ids; the default one without its check for 0 (once in 2^64 spans)."""
    return partial(getrandbits, 64) if type(generator) is RandomIdGenerator else generator.generate_span_id


def _context(
    trace_id: int,
    span_id: int,
    flags: TraceFlags,
    state: TraceState | None,
    is_remote: bool = False,
) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, flags, state)


class LightSpan(trace.NonRecordingSpan):
    """A span of the OpenTelemetry API. It records no exceptions: their messages may quote prompts."""

    # Defaults, which most spans keep.
    is_remote = False
    trace_state: TraceState | None = None
    has_remote_parent = False
    failed = False
    end_ns: int | None = None
    events: Sequence[Event] = ()
    links: Sequence[Linked] = ()
    dropped_links = 0
    now_ns: Callable[[], int] = staticmethod(time.time_ns)

    def __init__(  # noqa: PLR0913, PLR0917  # what a span is made of; names would cost as much as all else
        self,
        scope: SpanScope,
        name: str,
        kind: SpanKind,
        trace_id: int,
        span_id: int,
        parent_id: int,
        start_ns: int,
        completer: Completer | None = None,
        attributes: dict[str, AnyValue] | None = None,
    ) -> None:
        """Start the span; `parent_id` is 0 for a root. It keeps and extends `attributes`."""
        self.scope = scope
        self.name = name
        self.kind = kind
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent_id = parent_id
        self.start_ns = start_ns
        self.attributes: dict[str, AnyValue] = {} if attributes is None else attributes
        self.completer = completer

    def __repr__(self) -> str:
        return f"LightSpan({self.name!r}, {self.get_span_context()!r})"

    @property
    def context(self) -> SpanContext:
        """Return the span's context, by the name that span processors read."""
        return self.get_span_context()

    def get_span_context(self) -> SpanContext:
        """Return the span's context, which is always sampled."""
        return _context(self.trace_id, self.span_id, _SAMPLED, self.trace_state)

    def is_recording(self) -> bool:
        """Return True until the span has ended."""
        return self.end_ns is None

    def set_attribute(self, key: str, value: AnyValue) -> None:
        """Set an attribute, unless the span has ended."""
        if self.end_ns is None:
            self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AnyValue]) -> None:
        """Set attributes, unless the span has ended."""
        if self.end_ns is None:
            self.attributes.update(attributes)

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        """Add an event."""
        if not isinstance(self.events, BoundedList):
            self.events = BoundedList(_MAX_EVENTS)
        self.events.append(Event(name, attributes, self.now_ns() if timestamp is None else timestamp))

    def add_link(self, context: Named, attributes: Attributes = None) -> None:
        """Add a link."""
        self.link_to((context,), attributes)

    def link_to(self, spans: Iterable[Named | bytes], attributes: Attributes) -> None:
        """Add a link to each of `spans`."""
        links = [*self.links, *((span, attributes) for span in spans)]
        self.dropped_links += max(0, len(links) - _MAX_EVENTS)
        self.links = links[-_MAX_EVENTS:]

    def update_name(self, name: str) -> None:
        """Rename the span."""
        self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:  # noqa: ARG002
        """Note an error, which stays; descriptions are left out."""
        code = status.status_code if isinstance(status, Status) else status
        self.failed = self.failed or code is StatusCode.ERROR

    def end(self, end_time: int | None = None) -> None:
        """End the span and export it; call once."""
        if self.end_ns is None:
            self.end_ns = self.now_ns() if end_time is None else end_time
            self.scope.export(self)

    def complete(self) -> None:
        """Run the completer; called by the exporting thread."""
        completer, self.completer = self.completer, None
        if completer is not None:
            completer(self)


def readable(span: LightSpan) -> ReadableSpan:
    """Return a span that has ended as the SDK's `ReadableSpan`."""
    span.complete()
    parent = None
    if span.parent_id:
        parent = _context(span.trace_id, span.parent_id, _SAMPLED, span.trace_state, span.has_remote_parent)
    links = BoundedList.from_seq(_MAX_EVENTS, (trace.Link(_context_of(to), of) for to, of in span.links))
    links.dropped = span.dropped_links
    return ReadableSpan(
        name=span.name,
        context=span.get_span_context(),
        parent=parent,
        resource=span.scope.resource,
        attributes=span.attributes,
        events=span.events,
        links=links,
        kind=span.kind,
        status=Status(StatusCode.ERROR if span.failed else StatusCode.UNSET),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=span.scope.scope,
    )


def _context_of(named: Named | bytes) -> SpanContext:
    if isinstance(named, bytes):
        return unpacked(named)
    return _context(named.trace_id, named.span_id, _SAMPLED, None, named.is_remote)

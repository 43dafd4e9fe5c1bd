"""Spans that cost little: what a stream of rounds can afford for each of them, and an exporter can send.

The SDK's spans are safe from any thread, and check whatever they are told. These belong to one event loop,
are told what is right, and are made for sampled requests alone. A token's work comes to code and memory that
the processor has long forgotten, so what counts is how little is done then: a span keeps what it is told as
it is, ids are whole numbers, and what can wait is said in the thread that exports, for many spans in a row.

Imports the SDK: to be imported where traces are on.
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
_MOST = 128
"""Events, and links, of one span: the last of them, as by the SDK's default; how many there were is told."""


class Named(Protocol):
    """What a link can be to: another of these spans, or the context of any."""

    @property
    def trace_id(self) -> int: ...  # noqa: D102
    @property
    def span_id(self) -> int: ...  # noqa: D102
    @property
    def is_remote(self) -> bool: ...  # noqa: D102


Linked: TypeAlias = "tuple[Named | bytes, Attributes]"
"""A link; bytes are another process's span as messages name it (galley/common/tracing/span_names)."""
Tell: TypeAlias = "Callable[[LeanSpan], None]"
"""Completes a span that has ended, by attributes and links, in the thread that exports it."""


class SpanScope:
    """What the spans of one part of a process share, and `export`, which takes those that have ended."""

    def __init__(
        self, provider: TracerProvider, scope: InstrumentationScope, export: Callable[[LeanSpan], None]
    ) -> None:
        self.provider = provider
        self.scope = scope
        self.export = export
        self.new_trace_id: Callable[[], int] = provider.id_generator.generate_trace_id
        self.new_span_id = _span_ids(provider.id_generator)
        self.begin = partial(LeanSpan, self)
        self._follows = follows_sampled_parents(provider.sampler)

    @property
    def resource(self) -> Resource:
        """The process."""
        return self.provider.resource

    def request(self, parent: Context, name: str, attributes: Mapping[str, AnyValue]) -> SpanContext:
        """Of a server's span beneath `parent`, if that names one; the sampler is told the attributes."""
        above = trace.get_current_span(parent).get_span_context()
        trace_id = above.trace_id if above.is_valid else self.new_trace_id()
        result = self.provider.sampler.should_sample(parent, trace_id, name, SpanKind.SERVER, attributes)
        flags = _SAMPLED if result.decision is Decision.RECORD_AND_SAMPLE else _UNSAMPLED
        return _context(trace_id, self.new_span_id(), flags, result.trace_state)

    def keeps(self, name: str, trace_id: int, parent_id: int) -> bool:
        """Whether a server's span is kept whose caller's is; most samplers need not be asked."""
        if self._follows:
            return True
        caller = trace.NonRecordingSpan(_context(trace_id, parent_id, _SAMPLED, None, is_remote=True))
        context = trace.set_span_in_context(caller, Context())
        result = self.provider.sampler.should_sample(context, trace_id, name, SpanKind.SERVER)
        return result.decision is Decision.RECORD_AND_SAMPLE

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
        """Named before; `attributes` is kept and added to. All times are Unix nanoseconds."""
        ids = context.trace_id, context.span_id, 0 if parent is None else parent.span_id
        span = self.begin(name, kind, *ids, start_ns, None, attributes)
        span.trace_state = context.trace_state
        span.has_remote_parent = parent is not None and parent.is_remote
        span.now_ns = now_ns
        return span

    def root(self, name: str, start_ns: int, tell: Tell | None = None) -> LeanSpan:
        """A trace of its own."""
        ids = self.new_trace_id(), self.new_span_id(), 0
        return self.begin(name, SpanKind.INTERNAL, *ids, start_ns, tell)


def _span_ids(generator: IdGenerator) -> Callable[[], int]:
    """The default without its guard against 0, which comes once in 2^64 spans."""
    return partial(getrandbits, 64) if type(generator) is RandomIdGenerator else generator.generate_span_id


def _context(
    trace_id: int,
    span_id: int,
    flags: TraceFlags,
    state: TraceState | None,
    is_remote: bool = False,
) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, flags, state)


class LeanSpan(trace.NonRecordingSpan):
    """A span under way; only where it says otherwise does it differ from what the API promises.

    It keeps no exceptions: their messages may tell what a session is about.
    """

    # Of most spans.
    is_remote = False
    trace_state: TraceState | None = None
    has_remote_parent = False
    failed = False
    end_ns: int | None = None
    events: Sequence[Event] = ()
    links: Sequence[Linked] = ()
    dropped_links = 0
    # Further attributes, all of them whole numbers: names that come time and again, and as many values.
    numbers: tuple[tuple[str, ...], tuple[int, ...]] = ((), ())
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
        tell: Tell | None = None,
        attributes: dict[str, AnyValue] | None = None,
    ) -> None:
        """`parent_id` is 0 where it has none; `attributes` is kept and added to. Times are of Unix."""
        self.scope = scope
        self.name = name
        self.kind = kind
        self.trace_id = trace_id
        self.span_id = span_id
        self.parent_id = parent_id
        self.start_ns = start_ns
        self.attributes: dict[str, AnyValue] = {} if attributes is None else attributes
        self.tell = tell

    def __repr__(self) -> str:
        return f"LeanSpan({self.name!r}, {self.get_span_context()!r})"

    def get_span_context(self) -> SpanContext:
        """It is sampled, or it would not be."""
        return _context(self.trace_id, self.span_id, _SAMPLED, self.trace_state)

    def is_recording(self) -> bool:
        """Until it has ended."""
        return self.end_ns is None

    def set_attribute(self, key: str, value: AnyValue) -> None:
        """Unchecked; nothing once it has ended."""
        if self.end_ns is None:
            self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AnyValue]) -> None:
        """Unchecked; nothing once it has ended."""
        if self.end_ns is None:
            self.attributes.update(attributes)

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        """Unchecked."""
        if not isinstance(self.events, BoundedList):
            self.events = BoundedList(_MOST)
        self.events.append(Event(name, attributes, self.now_ns() if timestamp is None else timestamp))

    def add_link(self, context: Named, attributes: Attributes = None) -> None:
        """Unchecked."""
        self.link_to((context,), attributes)

    def link_to(self, spans: Iterable[Named | bytes], attributes: Attributes) -> None:
        """A link to each; one that is bytes is valid."""
        links = [*self.links, *((span, attributes) for span in spans)]
        self.dropped_links += max(0, len(links) - _MOST)
        self.links = links[-_MOST:]

    def update_name(self, name: str) -> None:
        """Until it has ended."""
        self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:  # noqa: ARG002
        """That of an error stays; what it says in words is left out."""
        code = status.status_code if isinstance(status, Status) else status
        self.failed = self.failed or code is StatusCode.ERROR

    def end(self, end_time: int | None = None) -> None:
        """Hand it over; once."""
        if self.end_ns is None:
            self.end_ns = self.now_ns() if end_time is None else end_time
            self.scope.export(self)

    def complete(self) -> None:
        """Let it be told what was left for now: by whoever exports it."""
        tell, self.tell = self.tell, None
        if tell is not None:
            tell(self)


def readable(span: LeanSpan) -> ReadableSpan:
    """The same for those who know the SDK's spans only; it has ended."""
    span.complete()
    parent = None
    if span.parent_id:
        parent = _context(span.trace_id, span.parent_id, _SAMPLED, span.trace_state, span.has_remote_parent)
    links = BoundedList.from_seq(_MOST, (trace.Link(_context_of(to), of) for to, of in span.links))
    links.dropped = span.dropped_links
    return ReadableSpan(
        name=span.name,
        context=span.get_span_context(),
        parent=parent,
        resource=span.scope.resource,
        attributes=dict(zip(*span.numbers, strict=True)) | span.attributes,
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

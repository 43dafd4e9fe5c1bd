"""Light spans: cheaper to record than the SDK's, which lock, check and copy every attribute.

A light span belongs to one event loop until it ends, and exists only for sampled requests. It stores what it
is given unchecked; ids are integers. Attributes that must be computed are set by the exporting thread (see
`Completer`), which also turns it into the SDK's `ReadableSpan` (`exporting.py`).

Messages name a span by its packed ids: trace id (16 bytes) and span id (8 bytes).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from random import getrandbits
from typing import TYPE_CHECKING, TypeAlias

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AnyValue, Attributes

if TYPE_CHECKING:  # the SDK is slow to load, and needed only where traces are on
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSAMPLED = TraceFlags(TraceFlags.DEFAULT)
MAX_EVENTS = 128
"""Most events, and most links, of one span: the last ones are kept and all are counted, as in the SDK."""
_TRACE_ID_BYTES, _SPAN_ID_BYTES = 16, 8
_NO_TRACE, _NO_SPAN = bytes(_TRACE_ID_BYTES), bytes(_SPAN_ID_BYTES)

Named: TypeAlias = "LightSpan | SpanContext | bytes"
"""The target of a link; bytes are the packed ids of another process's span."""
Completer: TypeAlias = "Callable[[LightSpan], None]"
"""A function that sets attributes and links of a span that has ended, in the exporting thread."""


def packed(trace_id: int, span_id: int) -> bytes:
    return trace_id.to_bytes(_TRACE_ID_BYTES) + span_id.to_bytes(_SPAN_ID_BYTES)


def names_a_span(name: bytes) -> bool:
    if len(name) != _TRACE_ID_BYTES + _SPAN_ID_BYTES:
        return False
    return name[:_TRACE_ID_BYTES] != _NO_TRACE and name[_TRACE_ID_BYTES:] != _NO_SPAN


def unpacked(name: bytes) -> SpanContext:
    """Unpack the context of a remote, sampled span; an invalid context for other bytes."""
    if not names_a_span(name):
        return trace.INVALID_SPAN_CONTEXT
    trace_id, span_id = (int.from_bytes(part) for part in (name[:_TRACE_ID_BYTES], name[_TRACE_ID_BYTES:]))
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=SAMPLED)


def follows_sampled_parents(sampler: Sampler) -> bool:
    """Return True if the sampler's description says that it keeps all spans below a sampled remote span."""
    description = sampler.get_description()
    return "ParentBased{" in description and ",remoteParentSampled:AlwaysOnSampler," in description


def _is_sampled(result: SamplingResult) -> bool:
    return bool(result.decision.is_sampled())  # type: ignore[no-untyped-call]  # is untyped


class SpanScope:
    """A maker of the spans of one instrumentation scope; `export` takes those that have ended."""

    def __init__(
        self, provider: TracerProvider, scope: InstrumentationScope, export: Callable[[LightSpan], None]
    ) -> None:
        self.provider = provider
        self.scope = scope
        self.export = export
        self.new_trace_id: Callable[[], int] = provider.id_generator.generate_trace_id
        self.new_span_id = partial(getrandbits, 64)
        self.begin = partial(LightSpan, self)
        self._follows = follows_sampled_parents(provider.sampler)

    def request(self, parent: Context, name: str, attributes: Mapping[str, AnyValue]) -> SpanContext:
        """Return the context of a new server span below `parent`; the sampler sees the attributes."""
        above = trace.get_current_span(parent).get_span_context()
        trace_id = above.trace_id if above.is_valid else self.new_trace_id()
        result = self.provider.sampler.should_sample(parent, trace_id, name, SpanKind.SERVER, attributes)
        flags = SAMPLED if _is_sampled(result) else _UNSAMPLED
        return SpanContext(trace_id, self.new_span_id(), False, flags, result.trace_state)

    def keeps(self, name: str, trace_id: int, parent_id: int) -> bool:
        """Return True if a server span below a sampled remote span is sampled."""
        if self._follows:
            return True
        caller = trace.NonRecordingSpan(SpanContext(trace_id, parent_id, True, SAMPLED))
        context = trace.set_span_in_context(caller, Context())
        return _is_sampled(self.provider.sampler.should_sample(context, trace_id, name, SpanKind.SERVER))

    @staticmethod
    def sampled(context: SpanContext) -> SpanContext:
        return SpanContext(context.trace_id, context.span_id, False, SAMPLED, context.trace_state)

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

    def step_of(self, request: LightSpan, name: str, start_ns: int) -> LightSpan:
        """Start the span of a step of several requests, beside that of the first.

        It is no child of `request`: that ends with its last result, so a killed process would leave orphans.
        """
        ids = request.trace_id, self.new_span_id(), request.parent_id
        span = self.begin(name, SpanKind.INTERNAL, *ids, start_ns)
        span.trace_state = request.trace_state
        span.has_remote_parent = request.has_remote_parent
        return span


class LightSpan(trace.NonRecordingSpan):
    """A span of the OpenTelemetry API. It records no exceptions: their messages may quote prompts."""

    # Defaults, which most spans keep.
    is_remote = False
    trace_state: TraceState | None = None
    has_remote_parent = False
    failed = False
    problem: str | None = None
    end_ns: int | None = None
    events: Sequence[tuple[str, Attributes, int]] = ()
    links: Sequence[tuple[Named, Attributes]] = ()
    event_count = 0
    link_count = 0
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
        return self.get_span_context()

    def get_span_context(self) -> SpanContext:
        """Return the span's context, which is always sampled."""
        return SpanContext(self.trace_id, self.span_id, False, SAMPLED, self.trace_state)

    def is_recording(self) -> bool:
        return self.end_ns is None

    def set_attribute(self, key: str, value: AnyValue) -> None:
        if self.end_ns is None:
            self.attributes[key] = value

    def set_attributes(self, attributes: Mapping[str, AnyValue]) -> None:
        if self.end_ns is None:
            self.attributes.update(attributes)

    def add_event(self, name: str, attributes: Attributes = None, timestamp: int | None = None) -> None:
        event = name, attributes, self.now_ns() if timestamp is None else timestamp
        self.events = (*self.events, event)[-MAX_EVENTS:]
        self.event_count += 1

    def add_link(self, context: Named, attributes: Attributes = None) -> None:
        self.link_to((context,), attributes)

    def link_to(self, spans: Iterable[Named], attributes: Attributes) -> None:
        added = [(span, attributes) for span in spans]
        self.links = (*self.links, *added)[-MAX_EVENTS:]
        self.link_count += len(added)

    def update_name(self, name: str) -> None:
        self.name = name

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Note an error, which stays."""
        code = status.status_code if isinstance(status, Status) else status
        if code is StatusCode.ERROR:
            self.failed = True
            self.problem = status.description if isinstance(status, Status) else description

    def end(self, end_time: int | None = None) -> None:
        """End the span and export it; call once."""
        if self.end_ns is None:
            self.end_ns = self.now_ns() if end_time is None else end_time
            self.scope.export(self)

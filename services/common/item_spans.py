"""The server's span of an item, and how a span is named in a message.

An item is traced where it says so itself, by a `traceparent` that is sampled: no span is made of any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import trace

from services.common.status import error_type
from services.common.telemetry import context_from, fail
from services.core import trace_names as names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.util.types import AttributeValue

    from services.core.content import Miss

# Of a traceparent, 00-<trace id>-<span id>-<flags>: the last digit of the flags, odd where it is sampled.
_FLAG = 54
_ODD = frozenset("13579bdf")
_TRACE_ID_BYTES, _SPAN_ID_BYTES = 16, 8
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)

RESULT, CACHE_MISS, SUPERSEDED, CANCELLED = "result", "cache_miss", "superseded", "cancelled"
_ERROR = "error"


class ItemSpan:
    """From the coming of an item to its last answer; of an item that is not traced each call is an `if`.

    `outcome` says how it ended: given up, unless an answer says otherwise.
    """

    def __init__(self, tracer: trace.Tracer, name: str, parent: str, session_id: str) -> None:
        """`parent` is the traceparent that came with the item."""
        self._parent = parent
        self.span = _begin(tracer, name, parent, session_id)
        self.traced = self.span.is_recording()
        self.outcome = CANCELLED

    @property
    def named(self) -> trace.Span:
        """Whom a log means: its span, or its caller's where it has none of its own."""
        return (
            self.span
            if self.traced or not self._parent
            else trace.get_current_span(context_from(self._parent))
        )

    @property
    def link(self) -> trace.Link | None:
        """What a batch in which the item takes part refers to it by; None where it is not traced."""
        if not self.traced:
            return None
        return trace.Link(self.span.get_span_context(), {names.LINK: names.LINK_ITEM})

    def missed(self, pool: str, miss: Miss, wanted: int) -> None:
        """The cache of this replica, of the pool, does not hold the `wanted` tokens that it builds on."""
        self.outcome = CACHE_MISS
        self.span.add_event(names.KV_MISSED, {names.POOL: pool, names.HAVE: miss.have, names.WANTED: wanted})

    def failed(self, error: BaseException) -> None:
        """It is answered with the status of this."""
        if self.traced:
            self.outcome = _ERROR
            tell_failure(self.span, error)

    def close(self, attributes: Mapping[str, AttributeValue]) -> None:
        """It has had its last answer."""
        self.span.set_attributes({names.OUTCOME: self.outcome, **attributes})
        self.span.end()


def _begin(tracer: trace.Tracer, name: str, parent: str, session_id: str) -> trace.Span:
    """An item without a traceparent is traced with the call that brought it, if that is."""
    if isinstance(tracer, trace.NoOpTracer) or (parent and not is_sampled(parent)):
        return trace.INVALID_SPAN
    context = context_from(parent) if parent else None
    if not trace.get_current_span(context).get_span_context().trace_flags.sampled:
        return trace.INVALID_SPAN
    return tracer.start_span(
        name,
        context,
        kind=trace.SpanKind.SERVER,
        attributes={names.RPC_SYSTEM: "grpc", names.SESSION_ID: session_id},
    )


def is_sampled(parent: str) -> bool:
    """Does this traceparent ask for spans? Cheap: what is none may seem to."""
    return parent[_FLAG : _FLAG + 1] in _ODD


def tell_failure(span: trace.Span, error: BaseException) -> None:
    """Have the span end as one that failed, named by the status that callers get."""
    fail(span, error_type(error))


def packed(span: trace.SpanContext) -> bytes:
    """How a message names a span: its trace id, 16 bytes, and its span id, 8 bytes."""
    return span.trace_id.to_bytes(_TRACE_ID_BYTES, "big") + span.span_id.to_bytes(_SPAN_ID_BYTES, "big")


def unpacked(name: bytes) -> trace.SpanContext:
    """The span of another process that a message names; it is sampled, or it would have no name.

    It is not valid if the name is not 24 bytes long.
    """
    if len(name) != _TRACE_ID_BYTES + _SPAN_ID_BYTES:
        return trace.INVALID_SPAN_CONTEXT
    trace_id, span_id = name[:_TRACE_ID_BYTES], name[_TRACE_ID_BYTES:]
    return trace.SpanContext(
        int.from_bytes(trace_id, "big"), int.from_bytes(span_id, "big"), is_remote=True, trace_flags=_SAMPLED
    )

"""The server's span of an item.

An item is traced where it says so itself, by a `traceparent` that is sampled: no span is made of any other.
"""

from __future__ import annotations

import re
import time

from opentelemetry import trace
from opentelemetry.util.types import AnyValue

from galley.common.tracing.light_spans import Completer, LightSpan, SpanScope
from galley.common.tracing.telemetry import context_from, fail
from galley.common.wire.status import error_type
from galley.core import names
from galley.core.content import Miss

# Of a traceparent, 00-<trace id>-<span id>-<flags>: the last digit of the flags, odd where it is sampled.
_FLAG = 54
_ODD = frozenset("13579bdf")
_OURS = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-01")
"""What a gateway sends; to read whatever W3C allows costs eight times as much."""

RESULT, CACHE_MISS, SUPERSEDED, CANCELLED = "result", "cache_miss", "superseded", "cancelled"
_ERROR = "error"
LINK_ITEM = {names.LINK: names.LINK_ITEM}
"""Of a link from a batch to the span of an item that takes part in it."""


class ItemSpan:
    """From the coming of an item to its last answer; of an item that is not traced each call is an `if`.

    `span` is None where it is not. `outcome` says how it ended: given up, unless an answer says otherwise.
    """

    def __init__(self, scope: SpanScope | None, name: str, parent: str, session_id: str) -> None:
        """`parent` is the traceparent that came with the item; `scope` is None where traces are off."""
        self._parent = parent
        self.span = None if scope is None else _begin(scope, name, parent, session_id)
        self.outcome = CANCELLED

    @property
    def named(self) -> trace.Span:
        """Whom a log means: its span, or its caller's where it has none of its own."""
        if self.span is not None:
            return self.span
        return trace.get_current_span(context_from(self._parent)) if self._parent else trace.INVALID_SPAN

    def missed(self, pool: str, miss: Miss, wanted: int) -> None:
        """The cache of this replica, of the pool, does not hold the `wanted` tokens that it builds on."""
        self.outcome = CACHE_MISS
        if self.span is not None:
            told: dict[str, AnyValue] = {names.POOL: pool, names.HAVE: miss.have, names.WANTED: wanted}
            self.span.add_event(names.KV_MISSED, told)

    def failed(self, error: BaseException) -> None:
        """It is answered with the status of this."""
        if self.span is not None:
            self.outcome = _ERROR
            tell_failure(self.span, error)

    def close(self, completer: Completer) -> None:
        """It has had its last answer; `tell` says the rest of it."""
        if self.span is not None:
            self.span.attributes[names.OUTCOME] = self.outcome
            self.span.completer = completer
            self.span.end()


def _begin(scope: SpanScope, name: str, parent: str, session_id: str) -> LightSpan | None:
    """An item without a traceparent is traced with the call that brought it, if that is."""
    if parent and not is_sampled(parent):
        return None
    if (ours := _OURS.fullmatch(parent)) is not None:
        trace_id, parent_id, is_remote = int(ours[1], 16), int(ours[2], 16), True
    else:
        above = trace.get_current_span(context_from(parent) if parent else None).get_span_context()
        if not above.trace_flags.sampled:
            return None
        trace_id, parent_id, is_remote = above.trace_id, above.span_id, above.is_remote
    if not (trace_id and parent_id and scope.keeps(name, trace_id, parent_id)):
        return None
    attributes: dict[str, AnyValue] = {names.RPC_SYSTEM: "grpc", names.SESSION_ID: session_id}
    ids = trace_id, scope.new_span_id(), parent_id
    span = scope.begin(name, trace.SpanKind.SERVER, *ids, time.time_ns(), None, attributes)
    span.has_remote_parent = is_remote
    return span


def is_sampled(parent: str) -> bool:
    """Does this traceparent ask for spans? Cheap: what is none may seem to."""
    return parent[_FLAG : _FLAG + 1] in _ODD


def tell_failure(span: trace.Span, error: BaseException) -> None:
    """Have the span end as one that failed, named by the status that callers get."""
    fail(span, error_type(error))

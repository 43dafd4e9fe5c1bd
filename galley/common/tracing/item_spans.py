"""The server span of a request in a stream of many sessions.

A request has a span only if its `traceparent` is sampled.
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
"""The form that gateways send; parsing all that W3C allows costs eight times as much."""

RESULT, CACHE_MISS, SUPERSEDED, CANCELLED = "result", "cache_miss", "superseded", "cancelled"
_ERROR = "error"
LINK_ITEM = {names.LINK: names.LINK_ITEM}
"""Attributes of a link from a batch to the span of a request in it."""


class ItemSpan:
    """A span from the arrival of a request to its last response; `span` is None if it is not traced.

    `outcome` is CANCELLED unless a response sets another.
    """

    def __init__(self, scope: SpanScope | None, name: str, parent: str, session_id: str) -> None:
        """Start the span; `parent` is the request's traceparent, and `scope` is None where traces are off."""
        self._parent = parent
        self.span = None if scope is None else _begin(scope, name, parent, session_id)
        self.outcome = CANCELLED

    @property
    def log_span(self) -> trace.Span:
        """Return the span that log lines name: the request's, or else its caller's."""
        if self.span is not None:
            return self.span
        return trace.get_current_span(context_from(self._parent)) if self._parent else trace.INVALID_SPAN

    def missed(self, pool: str, miss: Miss, expected: int) -> None:
        """Record a cache miss: the request builds on `expected` tokens."""
        self.outcome = CACHE_MISS
        if self.span is not None:
            facts: dict[str, AnyValue] = {names.POOL: pool, names.HAVE: miss.have, names.EXPECTED: expected}
            self.span.add_event(names.KV_MISSED, facts)

    def failed(self, error: BaseException) -> None:
        """Record the error that the request is answered with."""
        if self.span is not None:
            self.outcome = _ERROR
            record_failure(self.span, error)

    def close(self, completer: Completer) -> None:
        """End the span; `completer` sets its remaining attributes."""
        if self.span is not None:
            self.span.attributes[names.OUTCOME] = self.outcome
            self.span.completer = completer
            self.span.end()


def _begin(scope: SpanScope, name: str, parent: str, session_id: str) -> LightSpan | None:
    """Start the span; without a traceparent, below the call that brought the request."""
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
    """Return True if the traceparent is sampled; a cheap check that accepts some invalid ones."""
    return parent[_FLAG : _FLAG + 1] in _ODD


def record_failure(span: trace.Span, error: BaseException) -> None:
    """Mark the span as failed with the status that callers get."""
    fail(span, error_type(error))

"""The server span of a request in a stream of many sessions.

A request has a span only if its `traceparent` is sampled.
"""

from __future__ import annotations

import re
import time

from opentelemetry import trace
from opentelemetry.util.types import AnyValue

from galley.common.tracing.light_spans import LightSpan, SpanScope
from galley.common.tracing.telemetry import context_from, fail
from galley.common.wire.status import error_type
from galley.core import names
from galley.core.content import Miss
from galley.core.scheduler.messages import Superseded
from galley.pb.galley.v1 import galley_pb2 as pb

# Index of the last digit of a traceparent, 00-<trace id>-<span id>-<flags>. It is odd if it is sampled.
_FLAG = 54
_ODD = frozenset("13579bdf")
_OURS = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-01")
"""The form that gateways send; parsing all that W3C allows costs eight times as much."""

RESULT, CACHE_MISS, SUPERSEDED, CANCELLED = "result", "cache_miss", "superseded", "cancelled"
_ERROR = "error"
LINK_ITEM = {names.LINK: names.LINK_ITEM}
"""Attributes of a link from a batch to the span of a request in it."""


class ItemSpan:
    """A span from the arrival of a request to its last response; `span` is None if it is not traced."""

    def __init__(self, scope: SpanScope | None, name: str, pool: str, slice_: pb.SessionSlice) -> None:
        """Start the span of a request to `pool`; `scope` is None if traces are off."""
        self._pool = pool
        self._slice = slice_
        self.span = None if scope is None else _begin(scope, name, slice_.traceparent, slice_.session_id)
        self._outcome = CANCELLED

    @property
    def log_span(self) -> trace.Span:
        """Return the span that log lines name: the request's, or else its caller's."""
        if self.span is not None:
            return self.span
        parent = self._slice.traceparent
        return trace.get_current_span(context_from(parent)) if parent else trace.INVALID_SPAN

    def answered(self, outcome: object, *, preempted: bool = False) -> None:
        """Note the outcome of the last response; errors are for `failed`."""
        if self.span is None:
            return
        if isinstance(outcome, Superseded):
            self._outcome = SUPERSEDED
        elif not isinstance(outcome, Miss):
            self._outcome = RESULT
        else:
            self._outcome = CACHE_MISS
            facts: dict[str, AnyValue] = {names.POOL: self._pool, names.HAVE: outcome.have}
            if not preempted:
                facts[names.EXPECTED] = self._slice.start
            self.span.add_event(names.KV_PREEMPTED if preempted else names.KV_MISSED, facts)

    def failed(self, error: BaseException) -> None:
        if self.span is not None:
            self._outcome = _ERROR
            fail(self.span, error_type(error))

    def end(self) -> None:
        """End the span; without a response or an error the request was cancelled."""
        if self.span is not None:
            self.span.attributes[names.OUTCOME] = self._outcome
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

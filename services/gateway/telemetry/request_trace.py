"""The trace of one request: its span, those of its rounds, and those of the calls made for it.

The request's span ends when both its call and its session have ended: a session may go on without its client.
Times are the gateway's clock's, with one offset to Unix time for each request, so that the spans of a request
stay consistent when the system's clock is set.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from opentelemetry import context as current
from opentelemetry import trace
from opentelemetry.trace import SpanContext, SpanKind
from opentelemetry.util.types import AnyValue, Attributes

from galley.common.tracing.telemetry import fail, traceparent_of
from galley.common.wire.status import error_type
from galley.core import names
from galley.core.answer.answer import Chunk, NumericsChanged
from galley.core.errors import Fenced
from galley.core.session import events as ev
from galley.core.session.events import RoundEnded
from galley.core.session.machine import Session
from galley.core.session.ports import Replica
from galley.core.store import StoredSession
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.telemetry.attributes import (
    Sums,
    describe_request,
    result_attributes,
    session_attributes,
    span_name,
    stored_operation,
    stored_trace,
    trace_fields,
)
from services.gateway.telemetry.round_spans import RoundSpans
from services.gateway.telemetry.spans import CallSpan, RequestSpan, StoreCall, TraceStart

STALL_NS = 1_000_000_000
"""A client has stalled if it took a message only after this time."""


class RequestTrace:
    """Record one call; nothing if `start` is None."""

    def __init__(self, start: TraceStart | None = None) -> None:
        self._start = start
        self._request: RequestSpan | None = None
        self._rounds: RoundSpans | None = None
        self._unrecorded = CallSpan()
        self._name: str = names.TEXT_COMPLETION
        self._holds = 1
        self._status: grpc.StatusCode | None = None
        self._sums = Sums()
        self._target_failure: str | None = None

    def begin(self) -> None:
        """Make the request's span the current one of its call's context, sampled or not."""
        start = self._start
        if start is None:
            return
        self._unrecorded = CallSpan(traceparent_of(start.context))
        if start.context.trace_flags.sampled:
            self._record(start, start.context)
        else:  # so that logs have its id, and calls are not sampled either
            current.attach(trace.set_span_in_context(trace.NonRecordingSpan(start.context)))

    def adopt(self, span: trace.Span) -> None:
        """Record calls below a span that is started and ended elsewhere; replaces `begin`."""
        if self._start is not None and span.is_recording():
            self._request = RequestSpan(self._start, span)

    @property
    def context(self) -> SpanContext:
        """Return the context of the request's span; an invalid one where traces are off."""
        if self._request is not None:
            return self._request.context
        return trace.INVALID_SPAN_CONTEXT if self._start is None else self._start.context

    # ------------------------------------------------------------------------------ the call --

    def received(self, request: pb.GenerateRequest | pb.ResumeRequest, model: str, address: str) -> None:
        """Add attributes of the request; `model` is the served one, `address` the server's."""
        start = self._start
        if start is None:
            return
        description = describe_request(request, model, address, content=start.options.content)
        start.attributes.update(description.attributes)
        self._rename(description.name)

    def stored_fields(self) -> dict[str, bytes]:
        """Return the fields that a new session is stored with."""
        return {} if self._request is None else trace_fields(self._request.traceparent)

    def opened(self, session: Session, stored: StoredSession, called_ns: int, index: int | None) -> None:
        """Record a session created, or claimed to resume at `index`, by a store call made at `called_ns`."""
        start = self._start
        if start is None:
            return
        operation = start.attributes[names.OPERATION] = stored_operation(stored.fields)
        self._rename(span_name(operation, str(start.attributes.get(names.REQUEST_MODEL, ""))))
        self._continue(start, stored, "create" if index is None else "claim", called_ns)
        request, epoch = self._request, stored.ownership.epoch
        if request is None:
            return
        self._rounds = RoundSpans(request, start.options, session)
        resumed = index is not None or epoch > 1
        attributes = session_attributes(session.spec, content=start.options.content)
        attributes[names.RESPONSE_MODEL] = start.attributes.get(names.REQUEST_MODEL, "")
        request.span.set_attributes({**attributes, names.RESUMED: resumed, names.EPOCH: epoch})
        if resumed:
            request.event(names.SESSION_RESUMED, {names.EPOCH: epoch, names.INDEX: index or 0})

    def ended(self, status: grpc.StatusCode) -> None:
        """Note the call's status; only the first counts."""
        if self._start is not None:
            self._status = self._status or status

    def discard(self) -> None:
        """Ignore tracing requests (force flag, sampled parent) of unauthenticated callers."""
        start = self._start
        if start is not None and (start.parent is not None or names.FORCED in start.attributes):
            self._request = None

    def hold(self) -> None:
        """Keep the span open until a `release`, even if the call ends before."""
        self._holds += 1

    def release(self) -> None:
        """Undo a `hold`, or end the call; the last release ends the span."""
        self._holds -= 1
        if self._holds or self._start is None or self._request is None:
            return
        status = self._status or grpc.StatusCode.CANCELLED
        span = self._request.span
        span.set_attribute(names.RPC_STATUS, int(status.value[0]))
        if status is not grpc.StatusCode.OK:
            fail(span, status.name.lower())
        span.end(self._request.now_ns())

    # ---------------------------------------------------------------------------- the session --

    def round_ended(self, done: RoundEnded, draft: Replica | None, target: Replica | None) -> None:
        """Record a round with the replicas that drafted and verified it."""
        if self._rounds is not None:
            self._rounds.ended(done, draft, target)

    def committed(self, length: int, took_ns: int) -> None:
        """Record a commit, after which the token log holds `length` tokens."""
        if self._rounds is not None:
            self._rounds.committed(length, took_ns)

    def emitted(self, items: Iterable[Chunk | NumericsChanged]) -> None:
        """Record items that the client may have."""
        if self._request is None or self._start is None:
            return
        if self._sums.ttft_ns is None:
            self._sums.ttft_ns = self._request.now_ns() - self._start.start_ns
        for item in items:
            if isinstance(item, NumericsChanged):
                index, fingerprint = item.index, item.fingerprint
                self.event(names.NUMERICS_CHANGED, {names.INDEX: index, names.FINGERPRINT: fingerprint})

    def sent(self, took_ns: int) -> None:
        """Record a stall if the client took longer than STALL_NS for a message."""
        if self._request is not None and took_ns > STALL_NS:
            self._sums.stalled_ns += took_ns
            self.event(names.CLIENT_STALLED, {names.STALLED_NS: took_ns})

    def stopped(self, session: Session, end: ev.End | None) -> None:
        """Record the results of a session; `end` is None if it was stopped before one."""
        rounds, request = self._rounds, self._request
        if self._start is None or rounds is None or request is None:
            return
        self._rounds = None
        error = None if end is None else end.error
        rounds.stop(None if error is None else error_type(error))
        if isinstance(error, Fenced):
            self.event(names.SESSION_FENCED)
        ending = None if end is None else end.ending
        request.span.set_attributes(
            result_attributes(session, ending, rounds, content=self._start.options.content)
        )
        request.span.set_attributes(self._sums.attributes())

    # --------------------------------------------------------------------------------- calls --

    def call(self, name: str, replica: str) -> CallSpan:
        """Start the span of a request to the replica at this address."""
        request, rounds = self._request, self._rounds
        if request is None:
            return self._unrecorded
        now_ns = request.clock_ns() + request.offset_ns
        parent_id = 0 if rounds is None else rounds.parent_id(now_ns)
        attributes: dict[str, AnyValue] = {names.REPLICA: replica}
        kind = SpanKind.CLIENT
        span = request.child(name, now_ns, parent_id=parent_id, kind=kind, attributes=attributes)
        return CallSpan(request.child_traceparent(span), span, request)

    def store_call(self, operation: str) -> StoreCall | None:
        """Start the span of a store call; None where it is not recorded."""
        request = self._request
        return None if request is None else StoreCall(request, operation, request.now_ns())

    # -------------------------------------------------------------------------------- events --

    def event(self, name: str, attributes: Attributes = None) -> None:
        """Add an event to the open round, or else to the request."""
        if self._rounds is not None:
            self._rounds.event(name, attributes)
        elif self._request is not None:
            self._request.event(name, attributes)

    def moved(self, pool: str, source: str, to: str, reason: str) -> None:
        """Record that the session moved between two addresses of a pool."""
        if self._request is not None:
            self._sums.moves += 1
            attributes = {names.POOL: pool, names.SOURCE: source, names.TO: to, names.REASON: reason}
            self.event(names.SESSION_MOVED, attributes)

    def target_failed(self, reason: str) -> None:
        """Note a failed request to the target; the next one is a retry."""
        if self._rounds is not None:
            self._target_failure = reason

    def target_requested(self) -> None:
        """Note a new request to the target; record a retry if the one before failed."""
        if self._rounds is None:
            return
        self._rounds.target_requested()
        reason, self._target_failure = self._target_failure, None
        if reason is not None:
            self.event(names.REQUEST_RETRIED, {names.POOL: "target", names.REASON: reason})

    # ------------------------------------------------------------------------------ inside --

    def _record(self, start: TraceStart, context: SpanContext) -> RequestSpan:
        """Start recording the request."""
        span = start.scope.span(
            self._name,
            context,
            start.parent,
            start.start_ns,
            start.now_ns,
            kind=SpanKind.SERVER,
            attributes=start.attributes,
        )
        self._request = RequestSpan(start, span)
        return self._request

    def _rename(self, name: str) -> None:
        self._name = name
        if self._request is not None:
            self._request.span.update_name(name)

    def _continue(self, start: TraceStart, stored: StoredSession, operation: str, called_ns: int) -> None:
        """Link the request to the one that created the session.

        If that one is sampled, sample this one too, unless its caller decided otherwise.
        """
        before = stored_trace(stored.fields)
        if not before.is_valid or before.span_id == start.context.span_id:
            return
        request = self._request
        if request is None and start.parent is None:
            request = self._record(start, start.scope.sampled(start.context))
            StoreCall(request, operation, called_ns + start.offset_ns).end()
        if request is None:
            return
        request.span.add_link(before, {names.LINK: names.LINK_CONTINUES})


UNTRACED = RequestTrace()

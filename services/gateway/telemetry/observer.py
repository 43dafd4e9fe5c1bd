"""One observer of each request: it reports to the request's trace, to the metrics and to the log.

Code that works for a request finds the observer in its context (`request_observer`). Without one, and where
nothing is recorded, a report costs an `if`.

The request's span ends when both its call and its session have ended: a session may go on without its client.
Times are the gateway's clock's, with one offset to Unix time for each request, so that the spans of a request
stay consistent when the system's clock is set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import grpc
from opentelemetry import context as current
from opentelemetry import trace
from opentelemetry.trace import SpanContext, SpanKind
from opentelemetry.util.types import AnyValue, Attributes

from galley.common.tracing.telemetry import fail, traceparent_of
from galley.common.wire.status import error_type, http_status
from galley.core import names
from galley.core.answer.answer import Chunk, NumericsChanged
from galley.core.errors import AuthenticationUnavailable, Fenced, GalleyError, StoreUnavailable
from galley.core.session import events as ev
from galley.core.session.events import Clock, Replica, RoundEnded
from galley.core.session.machine import Session
from galley.core.store import StoredSession
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.client_call import ClientCall
from services.gateway.telemetry.attributes import (
    OPERATION_FIELD,
    TRACE_FIELD,
    Sums,
    describe_request,
    operation_of,
    result_attributes,
    session_attributes,
    span_name,
    stored_operation,
    stored_trace,
)
from services.gateway.telemetry.call import STALL_NS, Call, CallMetrics, Failure, end_of, failure_of
from services.gateway.telemetry.session_metrics import SessionCounts, SessionMetrics
from services.gateway.telemetry.spans import CallSpan, RequestSpan, RoundSpans, StoreCall, TraceStart

_KEPT_ROUNDS = 1024


class RequestObserver:
    """Report what happens to one request: to its trace unless `start` is None, and to metrics if given."""

    def __init__(self, start: TraceStart | None = None, sessions: SessionMetrics | None = None) -> None:
        self._start = start
        self.sessions = sessions
        self._call: Call | None = None
        self._counts: SessionCounts | None = None
        self._operation: str = names.TEXT_COMPLETION
        self._name: str = names.TEXT_COMPLETION
        self._request: RequestSpan | None = None
        self._rounds: RoundSpans | None = None
        self._unrecorded = CallSpan()
        self._holds = 1
        self._end: Failure | None = None
        self._sums = Sums()
        self._target_failure: str | None = None
        self._kept: deque[RoundEnded] | None = None

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

    def received(
        self,
        request: pb.GenerateRequest | pb.ResumeRequest,
        model: str,
        address: str,
        call: Call,
        sessions: SessionMetrics | None,
    ) -> None:
        self._call, self.sessions, self._operation = call, sessions, operation_of(request)
        if (start := self._start) is not None:
            name, attributes = describe_request(request, model, address, content=start.options.content)
            start.attributes.update(attributes)
            self._rename(name)

    def stored_fields(self) -> dict[str, bytes]:
        """Return the fields that a new session keeps of its request."""
        fields: dict[str, bytes] = {}
        if self._operation != names.TEXT_COMPLETION:
            fields[OPERATION_FIELD] = self._operation.encode()
        if self._request is not None:
            fields[TRACE_FIELD] = self._request.traceparent.encode()
        return fields

    def rejected(self, reason: str) -> None:
        if self._call is not None:
            self._call.not_admitted(reason)

    def opened(
        self, session: Session, stored: StoredSession, called_ns: int, index: int | None = None
    ) -> None:
        """Report a session created, or claimed to resume at `index`, by a store call made at `called_ns`."""
        is_new = index is None and stored.ownership.epoch == 1
        if self._start is not None:
            self._trace_opened(self._start, session, stored, called_ns, index)
        if self.sessions is not None:
            workload, principal = session.spec.workload, stored.principal
            self._counts = SessionCounts(self.sessions, workload, principal, self.context)
            if is_new:
                self._counts.began(len(session.spec.prompt))
        if self._call is not None:
            self._call.opened(session, stored, is_new=is_new)

    def sending(self, item: Chunk | NumericsChanged | ev.End) -> None:
        if self._call is not None:
            self._call.sending(item)

    def sent(self, waited_ns: int) -> None:
        """Report how long the client's transport took to accept an item."""
        if waited_ns <= STALL_NS:
            return
        if self._request is not None:
            self._sums.stalled_ns += waited_ns
            self.event(names.CLIENT_STALLED, {names.STALLED_NS: waited_ns})
        if self._call is not None:
            self._call.stalled_ns += waited_ns
        if self.sessions is not None:
            self.sessions.stalls.value += 1

    def failed(self, error: BaseException) -> None:
        """Report the error that a call ends with, if its handler will only see a cancellation."""
        self.ended(failure_of(error))
        if self._call is not None:
            self._call.error = error

    def ended(self, end: Failure) -> None:
        """Note how the call ended; only the first counts."""
        self._end = self._end or end

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
        if self._holds or self._request is None:
            return
        end, span = self._end or Failure(grpc.StatusCode.CANCELLED), self._request.span
        status, transport = end.status, self._start.transport if self._start else {}
        if names.HTTP_METHOD in transport:
            span.set_attribute(names.HTTP_STATUS, transport.get(names.HTTP_STATUS, http_status(status)))
        else:
            span.set_attribute(names.RPC_STATUS, int(status.value[0]))
        if status is not grpc.StatusCode.OK:
            fail(span, status.name.lower(), end.message)
        if end.field:
            span.set_attribute(names.FIELD, end.field)
        span.end(self._request.now_ns())

    # --------------------------------------------------------------------------- the session --

    def emitted(self) -> None:
        """Report that the client may have further tokens, for they are committed."""
        if self._sums.ttft_ns is None and self._request is not None and self._start is not None:
            self._sums.ttft_ns = self._request.now_ns() - self._start.start_ns

    def numerics_changed(self, change: NumericsChanged) -> None:
        self.event(names.NUMERICS_CHANGED, {names.INDEX: change.index, names.FINGERPRINT: change.fingerprint})

    def round_ended(self, done: RoundEnded, draft: Replica | None, target: Replica | None) -> None:
        """Report a round with the replicas that drafted and verified it."""
        if self._rounds is not None:
            self._rounds.ended(done, draft, target)
        if self._counts is not None:
            self._counts.round_ended(done)
        if self._kept is not None:
            self._kept.append(done)

    def keep_rounds(self) -> deque[RoundEnded]:
        """Return a queue that gets each further round, and drops the oldest if nobody takes them."""
        self._kept = deque(maxlen=_KEPT_ROUNDS)
        return self._kept

    def committed(self, length: int, took_ns: int, error: GalleyError | None) -> None:
        if self._rounds is not None and error is None:
            self._rounds.committed(length, took_ns)
        if self._counts is not None:
            self._counts.committed(took_ns, error)

    def missed(self, pool: ev.Pool, have: int, expected: int) -> None:
        """Report a replica that holds `have` tokens of the session, where `expected` were due."""
        self.event(names.KV_MISSED, {names.POOL: pool.value, names.HAVE: have, names.EXPECTED: expected})
        if self.sessions is not None:
            self.sessions.misses[pool.value].value += 1

    def passed_states(self, direction: str, size: int) -> None:
        """Report bytes of the target's states: "received" from it, or "sent" to a draft."""
        if self.sessions is not None:
            self.sessions.state_bytes[direction].value += size

    def stopped(self, session: Session, end: ev.End | None) -> None:
        """Report that the session has stopped here; `end` is None if it was stopped before it ended."""
        if self._counts is not None:
            self._counts.stopped()
        if self.sessions is not None:
            self.sessions.count_proposals(session.stats)
        rounds, request = self._rounds, self._request
        if self._start is None or rounds is None or request is None:
            return
        self._rounds = None
        error = None if end is None else end.error
        rounds.stop(None if error is None else error_type(error))
        if isinstance(error, Fenced):
            self.event(names.SESSION_FENCED)
        ending, content = None if end is None else end.ending, self._start.options.content
        request.span.set_attributes(result_attributes(session, ending, rounds, self._sums, content=content))

    # ------------------------------------------------------------------- calls of the request --

    def call(self, name: str, replica: str) -> CallSpan:
        request, rounds = self._request, self._rounds
        if request is None:
            return self._unrecorded
        now_ns = request.now_ns()
        parent_id = 0 if rounds is None else rounds.parent_id(now_ns)
        attributes: dict[str, AnyValue] = {names.REPLICA: replica}
        kind = SpanKind.CLIENT
        span = request.child(name, now_ns, parent_id=parent_id, kind=kind, attributes=attributes)
        return CallSpan(request.child_traceparent(span), span, request)

    def store_call(self, operation: str, ago_ns: int = 0) -> StoreCall:
        """Return the span of a call of the session store that began `ago_ns` ago."""
        request = self._request
        return StoreCall(request, operation, 0 if request is None else request.now_ns() - ago_ns)

    def store_called(self, operation: str, took_ns: int, error: GalleyError | None) -> None:
        """Report a call of the session store that has ended."""
        if self._request is not None:
            self.store_call(operation, took_ns).end(error)

    def store_retried(self, call: StoreCall, error: StoreUnavailable) -> None:
        call.retried(error)
        if self.sessions is not None:
            self.sessions.retries.value += 1

    def target_requested(self) -> None:
        """Report a new request to the target; it is a retry if the one before failed."""
        if self._rounds is None:
            return
        self._rounds.target_requested()
        reason, self._target_failure = self._target_failure, None
        if reason is not None:
            self.retried(ev.Pool.TARGET, reason)

    def target_failed(self, reason: str) -> None:
        if self._rounds is not None:
            self._target_failure = reason

    def retried(self, pool: ev.Pool, reason: str) -> None:
        self.event(names.REQUEST_RETRIED, {names.POOL: pool.value, names.REASON: reason})

    def moved(self, pool: str, source: str, to: str, reason: str) -> None:
        """Report that the session moved between two addresses of a pool."""
        if self._request is not None:
            self._sums.moves += 1
            attributes = {names.POOL: pool, names.SOURCE: source, names.TO: to, names.REASON: reason}
            self.event(names.SESSION_MOVED, attributes)

    def event(self, name: str, attributes: Attributes = None) -> None:
        """Add an event to the open round, or else to the request."""
        if self._rounds is not None:
            self._rounds.event(name, attributes)
        elif self._request is not None:
            self._request.event(name, attributes)

    # ------------------------------------------------------------------------------ inside --

    def _record(self, start: TraceStart, context: SpanContext) -> RequestSpan:
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

    def _trace_opened(
        self, start: TraceStart, session: Session, stored: StoredSession, called_ns: int, index: int | None
    ) -> None:
        operation = start.attributes[names.OPERATION] = stored_operation(stored.fields)
        self._rename(span_name(operation, str(start.attributes.get(names.REQUEST_MODEL, ""))))
        self._continue(start, stored, "create" if index is None else "claim", called_ns)
        request, epoch = self._request, stored.ownership.epoch
        if request is None:
            return
        self._rounds = RoundSpans(request, start.options, session)
        resumed = index is not None or epoch > 1
        attributes = session_attributes(session.spec, content=start.options.content)
        requested = start.attributes.get(names.REQUEST_MODEL, "")
        attributes[names.RESPONSE_MODEL] = session.spec.lora or requested
        request.span.set_attributes({**attributes, names.RESUMED: resumed, names.EPOCH: epoch})
        if resumed:
            request.event(names.SESSION_RESUMED, {names.EPOCH: epoch, names.INDEX: index or 0})

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
        if request is not None:
            request.span.add_link(before, {names.LINK: names.LINK_CONTINUES})


_UNOBSERVED = RequestObserver()
_CURRENT: ContextVar[RequestObserver] = ContextVar("request_observer")


def request_observer() -> RequestObserver:
    return _CURRENT.get(_UNOBSERVED)


def observe_with(observer: RequestObserver) -> None:
    _CURRENT.set(observer)


class RequestObservers:
    """Observe the requests of a gateway; count nothing without metrics."""

    def __init__(
        self, clock: Clock, calls: CallMetrics | None = None, sessions: SessionMetrics | None = None
    ) -> None:
        self._clock = clock
        self._calls = calls
        self._sessions = sessions

    @contextmanager
    def stream(
        self,
        request: pb.GenerateRequest | pb.ResumeRequest,
        client: ClientCall,
        model: str,
        address: str,
    ) -> Iterator[RequestObserver]:
        """Observe a call of Generate or Resume; `model` is the served one, `address` the server's."""
        observer = self._observer()
        requested = request.model if isinstance(request, pb.GenerateRequest) else None
        operation = operation_of(request)
        call = Call(self._clock, client, operation, requested, observer.context, model, self._calls)
        observer.received(request, model, address, call, self._sessions)
        try:
            yield observer
        except BaseException as error:
            call.ended(error)
            raise
        call.ended(None)

    def unary(self) -> None:
        self._observer().sessions = self._sessions

    def count_unidentified(self, error: AuthenticationUnavailable) -> None:
        """Count the end of a stream whose caller could not be identified: it has no `Call` yet."""
        if self._calls is not None:
            self._calls.streams.at(*end_of(error)).value += 1

    def _observer(self) -> RequestObserver:
        """Return the observer of the call's interceptor, or a new one where traces are off."""
        observer = request_observer()
        if observer is _UNOBSERVED:
            observer = RequestObserver()
            observe_with(observer)
        return observer

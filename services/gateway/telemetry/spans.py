"""The trace of one request: its own span, those of its rounds, and of what is asked of others for it.

Whoever works for a request finds its trace in the context (`request_trace`); without one, or where it is not
sampled, whatever is told it costs an `if`. The request's span ends when its call and its session are both
over: a session may go on without its client.

Times are the gateway's clock's, turned into Unix time by one offset for each request: the spans of a request
fit together, whatever is done to the system's clock meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar

import grpc
from opentelemetry import context as current
from opentelemetry import trace
from opentelemetry.trace import SpanContext, SpanKind
from opentelemetry.util.types import AnyValue, Attributes

from galley.common.tracing.telemetry import fail, traceparent_of
from galley.common.wire.status import code_of, error_type
from galley.core import names
from galley.core.answer.answer import Chunk, NumericsChanged
from galley.core.errors import Fenced
from galley.core.session import events as ev
from galley.core.session.events import RoundEnded
from galley.core.session.machine import Session
from galley.core.session.ports import Replica
from galley.core.store import StoredSession
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.telemetry.attributes import Sums, asked_of, end_of, session_of, span_name
from services.gateway.telemetry.call_spans import CallSpan, StoreCall
from services.gateway.telemetry.origin import stored_operation, stored_trace, trace_fields
from services.gateway.telemetry.own_span import Begun, RequestSpan
from services.gateway.telemetry.round_spans import Rounds

STALL_NS = 1_000_000_000
"""A client that leaves room for a message only after so long has stalled."""


class RequestTrace:
    """Of one call; `Begun` is None where traces are off."""

    def __init__(self, begun: Begun | None = None) -> None:
        self._begun = begun
        self._request: RequestSpan | None = None
        self._rounds: Rounds | None = None
        self._untold = CallSpan()
        self._name: str = names.TEXT_COMPLETION
        self._holds = 1
        self._outcome: grpc.StatusCode | None = None
        self._sums = Sums()
        self._target_failure: str | None = None

    def begin(self) -> None:
        """In its call's context, whose current span it is from now on, sampled or not."""
        begun = self._begun
        if begun is None:
            return
        self._untold = CallSpan(traceparent_of(begun.context))
        if begun.context.trace_flags.sampled:
            self._record(begun, begun.context)
        else:  # so that logs name it, and whatever is called is not sampled either
            current.attach(trace.set_span_in_context(trace.NonRecordingSpan(begun.context)))

    def adopt(self, span: trace.Span) -> None:
        """In place of `begin`: tell what is asked beneath a span that is begun and ended elsewhere."""
        if self._begun is not None and span.is_recording():
            self._request = RequestSpan(self._begun, span)

    @property
    def context(self) -> SpanContext:
        """Of the request's span; an invalid one where traces are off."""
        if self._request is not None:
            return self._request.context
        return trace.INVALID_SPAN_CONTEXT if self._begun is None else self._begun.context

    # ------------------------------------------------------------------------------ the call --

    def asked(self, request: pb.GenerateRequest | pb.ResumeRequest, served: str, address: str) -> None:
        """What it says of itself; `served` is the model here, `address` the server's."""
        begun = self._begun
        if begun is None:
            return
        asked = asked_of(request, served, address, content=begun.options.content)
        begun.attributes.update(asked.attributes)
        self._rename(asked.name)

    def stored_fields(self) -> dict[str, bytes]:
        """What a session that begins now keeps of it."""
        return {} if self._request is None else trace_fields(self._request.traceparent)

    def opened(self, session: Session, stored: StoredSession, asked_ns: int, index: int | None) -> None:
        """The session is its own, made or claimed since `asked_ns`; claimed to go on at `index`."""
        begun = self._begun
        if begun is None:
            return
        operation = begun.attributes[names.OPERATION] = stored_operation(stored.fields)
        self._rename(span_name(operation, str(begun.attributes.get(names.REQUEST_MODEL, ""))))
        self._continue(begun, stored, "create" if index is None else "claim", asked_ns)
        request, epoch = self._request, stored.ownership.epoch
        if request is None:
            return
        self._rounds = Rounds(request, begun.options, session)
        resumed = index is not None or epoch > 1
        attributes = session_of(session.spec, content=begun.options.content)
        attributes[names.RESPONSE_MODEL] = begun.attributes.get(names.REQUEST_MODEL, "")
        request.span.set_attributes({**attributes, names.RESUMED: resumed, names.EPOCH: epoch})
        if resumed:
            request.event(names.SESSION_RESUMED, {names.EPOCH: epoch, names.INDEX: index or 0})

    def failed(self, error: BaseException) -> None:
        """What the client is told in the end. Of several ends, the first counts."""
        self.ended(code_of(error))

    def ended(self, outcome: grpc.StatusCode) -> None:
        """The same, by status."""
        if self._begun is not None:
            self._outcome = self._outcome or outcome

    def disown(self) -> None:
        """Its caller is nobody known: what a stranger wishes or samples is not traced for that."""
        begun = self._begun
        if begun is not None and (begun.parent is not None or names.FORCED in begun.attributes):
            self._request = None

    def hold(self) -> None:
        """Somebody works for it, whether or not its call is over."""
        self._holds += 1

    def release(self) -> None:
        """Somebody is done, or the call is over; the last of them ends it."""
        self._holds -= 1
        if self._holds or self._begun is None or self._request is None:
            return
        outcome = self._outcome or grpc.StatusCode.CANCELLED
        span = self._request.span
        span.set_attribute(names.RPC_STATUS, int(outcome.value[0]))
        if outcome is not grpc.StatusCode.OK:
            fail(span, outcome.name.lower())
        span.end(self._request.now_ns())

    # ---------------------------------------------------------------------------- the session --

    def round_ended(self, done: RoundEnded, draft: Replica | None, target: Replica | None) -> None:
        """With its verdict; who drafted and verified it."""
        if self._rounds is not None:
            self._rounds.ended(done, draft, target)

    def committed(self, length: int, took_ns: int) -> None:
        """The log holds `length` tokens."""
        if self._rounds is not None:
            self._rounds.committed(length, took_ns)

    def emitted(self, items: Iterable[Chunk | NumericsChanged]) -> None:
        """The client may have them."""
        if self._request is None or self._begun is None:
            return
        if self._sums.ttft_ns is None:
            self._sums.ttft_ns = self._request.now_ns() - self._begun.start_ns
        for item in items:
            if isinstance(item, NumericsChanged):
                index, fingerprint = item.index, item.fingerprint
                self.event(names.NUMERICS_CHANGED, {names.INDEX: index, names.FINGERPRINT: fingerprint})

    def sent(self, took_ns: int) -> None:
        """The client has made room for a message."""
        if self._request is not None and took_ns > STALL_NS:
            self._sums.stalled_ns += took_ns
            self.event(names.CLIENT_STALLED, {names.STALLED_NS: took_ns})

    def stopped(self, session: Session, end: ev.End | None) -> None:
        """Nobody works for it any more; `end` is None where it was not let to come to one."""
        rounds, request = self._rounds, self._request
        if self._begun is None or rounds is None or request is None:
            return
        self._rounds = None
        error = None if end is None else end.error
        rounds.stop(None if error is None else error_type(error))
        if isinstance(error, Fenced):
            self.event(names.SESSION_FENCED)
        ending = None if end is None else end.ending
        request.span.set_attributes(end_of(session, ending, rounds, content=self._begun.options.content))
        request.span.set_attributes(self._sums.attributes())

    # ------------------------------------------------------------------ what is asked of others --

    def call(self, name: str, replica: str) -> CallSpan:
        """An item that is asked of the replica at this address."""
        request, rounds = self._request, self._rounds
        if request is None:
            return self._untold
        now_ns = request.clock_ns() + request.offset_ns
        parent_id = 0 if rounds is None else rounds.parent_id(now_ns)
        attributes: dict[str, AnyValue] = {names.REPLICA: replica}
        kind = SpanKind.CLIENT
        span = request.child(name, now_ns, parent_id=parent_id, kind=kind, attributes=attributes)
        return CallSpan(request.named(span), span, request)

    def store_call(self, operation: str) -> StoreCall | None:
        """A call to the store; None where nothing is told of it."""
        request = self._request
        return None if request is None else StoreCall(request, operation, request.now_ns())

    # ------------------------------------------------------------------------- what happened --

    def event(self, name: str, attributes: Attributes = None) -> None:
        """Of the round that is under way, if there is one, else of the request."""
        if self._rounds is not None:
            self._rounds.event(name, attributes)
        elif self._request is not None:
            self._request.event(name, attributes)

    def moved(self, facts: Attributes) -> None:
        """Another replica serves the session."""
        if self._request is not None:
            self._sums.moves += 1
            self.event(names.SESSION_MOVED, facts)

    def missed(self, pool: str, have: int, wanted: int) -> None:
        """A replica holds less of the session than it was thought to."""
        self.event(names.KV_MISSED, {names.POOL: pool, names.HAVE: have, names.WANTED: wanted})

    def target_failed(self, why: str) -> None:
        """What is asked of a target next is asked again."""
        if self._rounds is not None:
            self._target_failure = why

    def asked_target(self) -> None:
        """A new item, maybe after one that failed."""
        if self._rounds is None:
            return
        self._rounds.asked_target()
        why, self._target_failure = self._target_failure, None
        if why is not None:
            self.retried("target", why)

    def retried(self, pool: str, why: str) -> None:
        """What failed is asked again, of the same replica or another."""
        self.event(names.REQUEST_RETRIED, {names.POOL: pool, names.REASON: why})

    # ------------------------------------------------------------------------------ inside --

    def _record(self, begun: Begun, context: SpanContext) -> RequestSpan:
        """From now on it is told."""
        span = begun.scope.span(
            self._name,
            context,
            begun.parent,
            begun.start_ns,
            begun.now_ns,
            kind=SpanKind.SERVER,
            attributes=begun.attributes,
        )
        self._request = RequestSpan(begun, span)
        return self._request

    def _rename(self, name: str) -> None:
        self._name = name
        if self._request is not None:
            self._request.span.update_name(name)

    def _continue(self, begun: Begun, stored: StoredSession, operation: str, asked_ns: int) -> None:
        """Link it to the request that began the session.

        Where no caller has decided otherwise it is then told as that one is, whatever chance had said.
        """
        before = stored_trace(stored.fields)
        if not before.is_valid or before.span_id == begun.context.span_id:
            return
        request = self._request
        if request is None and begun.parent is None:
            request = self._record(begun, begun.scope.sampled(begun.context))
            StoreCall(request, operation, asked_ns + begun.offset_ns).end()
        if request is None:
            return
        request.span.add_link(before, {names.LINK: names.LINK_CONTINUES})


UNTRACED = RequestTrace()
_CURRENT: ContextVar[RequestTrace] = ContextVar("request_trace")


def request_trace() -> RequestTrace:
    """Of the request that is worked for."""
    return _CURRENT.get(UNTRACED)


def work_for(request: RequestTrace) -> None:
    """From now on, in this call's context and in all that it begins."""
    _CURRENT.set(request)

"""One observer of each request: it reports to the request's trace, to the metrics and to the log.

Code that works for a request finds the observer in its context (`request_observer`). Without one, and where
nothing is recorded, a report costs an `if`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import grpc
from opentelemetry.util.types import Attributes

from galley.common.wire.status import code_of
from galley.core import names
from galley.core.answer.answer import Chunk, NumericsChanged
from galley.core.errors import GalleyError, StoreUnavailable
from galley.core.session import events as ev
from galley.core.session.events import RoundEnded
from galley.core.session.machine import Session
from galley.core.session.ports import Clock, Replica
from galley.core.store import StoredSession
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.telemetry.attributes import operation_fields, operation_of
from services.gateway.telemetry.call import Call
from services.gateway.telemetry.call_metrics import CallMetrics
from services.gateway.telemetry.request_trace import UNTRACED, RequestTrace
from services.gateway.telemetry.session_metrics import SessionCounts, SessionMetrics
from services.gateway.telemetry.spans import CallSpan, StoreCall


class RequestObserver:
    """Report what happens to one request. `call` and `sessions` are None where they are not recorded."""

    def __init__(
        self,
        trace: RequestTrace = UNTRACED,
        call: Call | None = None,
        sessions: SessionMetrics | None = None,
        operation: str = names.TEXT_COMPLETION,
    ) -> None:
        self.trace = trace
        self._call = call
        self._sessions = sessions
        self._counts: SessionCounts | None = None
        self._operation = operation

    # ------------------------------------------------------------------------------ the call --

    def stored_fields(self) -> dict[str, bytes]:
        """Return the fields that a new session keeps of its request."""
        return operation_fields(self._operation) | self.trace.stored_fields()

    def rejected(self, reason: str) -> None:
        """Count a call that was not admitted."""
        if self._call is not None:
            self._call.not_admitted(reason)

    def opened(
        self, session: Session, stored: StoredSession, called_ns: int, index: int | None = None
    ) -> None:
        """Report a session created, or claimed to resume at `index`, by a store call made at `called_ns`."""
        self.trace.opened(session, stored, called_ns, index)
        if self._sessions is not None:
            self._counts = SessionCounts(self._sessions, session.spec.workload, self.trace.context)
        if self._call is not None:
            self._call.opened(session, stored, is_new=index is None and stored.ownership.epoch == 1)

    def sending(self, item: Chunk | NumericsChanged | ev.End) -> None:
        """Report an item that is handed to the client's transport."""
        if self._call is not None:
            self._call.sending(item)

    def sent(self, waited_ns: int) -> None:
        """Report how long the client's transport took to accept an item."""
        self.trace.sent(waited_ns)
        if self._call is not None:
            self._call.sent(waited_ns)
        if self._counts is not None:
            self._counts.sent(waited_ns)

    def failed(self, error: BaseException) -> None:
        """Report the error that a call ends with, if its handler will only see a cancellation."""
        self.trace.ended(code_of(error))
        if self._call is not None:
            self._call.failed(error)

    # --------------------------------------------------------------------------- the session --

    def emitted(self, items: Iterable[Chunk | NumericsChanged]) -> None:
        """Report items that the client may have, for their tokens are committed."""
        self.trace.emitted(items)

    def round_ended(self, done: RoundEnded, draft: Replica | None, target: Replica | None) -> None:
        """Report a round with the replicas that drafted and verified it."""
        self.trace.round_ended(done, draft, target)
        if self._counts is not None:
            self._counts.round_ended(done)

    def committed(self, length: int, took_ns: int, error: GalleyError | None) -> None:
        """Report a commit, after which the token log holds `length` tokens unless there was an error."""
        if error is None:
            self.trace.committed(length, took_ns)
        if self._counts is not None:
            self._counts.committed(took_ns, error)

    def missed(self, pool: ev.Pool, have: int, expected: int) -> None:
        """Report a replica that holds `have` tokens of the session, where `expected` were due."""
        self.trace.event(
            names.KV_MISSED, {names.POOL: pool.value, names.HAVE: have, names.EXPECTED: expected}
        )
        if self._counts is not None:
            self._counts.missed(pool.value)

    def stopped(self, session: Session, end: ev.End | None) -> None:
        """Report that nothing works for the session any more; `end` is None if it was stopped before one."""
        self.trace.stopped(session, end)
        if self._counts is not None:
            self._counts.stopped(session.stats)

    # --------------------------------------------------------------------- calls it makes --

    def call(self, name: str, replica: str) -> CallSpan:
        """Start the span of a request to the replica at this address."""
        return self.trace.call(name, replica)

    def store_call(self, operation: str) -> StoreCall | None:
        """Start the span of a store call; None where it is not recorded."""
        return self.trace.store_call(operation)

    def store_retried(self, call: StoreCall | None, error: StoreUnavailable) -> None:
        """Report a failed attempt of a store call that is repeated."""
        if call is not None:
            call.retried(error)
        if self._sessions is not None:
            self._sessions.retries.value += 1

    def target_requested(self) -> None:
        """Report a new request to the target."""
        self.trace.target_requested()

    def target_failed(self, reason: str) -> None:
        """Report a failed request to the target; the next one is a retry."""
        self.trace.target_failed(reason)

    def draft_retried(self, reason: str) -> None:
        """Report a failed request to a draft that is repeated at another."""
        self.trace.event(names.REQUEST_RETRIED, {names.POOL: ev.Pool.DRAFT.value, names.REASON: reason})

    def moved(self, pool: str, source: str, to: str, reason: str) -> None:
        """Report that the session moved between two addresses of a pool."""
        self.trace.moved(pool, source, to, reason)

    def event(self, name: str, attributes: Attributes = None) -> None:
        """Add an event to the trace."""
        self.trace.event(name, attributes)


_UNOBSERVED = RequestObserver()
_CURRENT: ContextVar[RequestObserver] = ContextVar("request_observer")


def request_observer() -> RequestObserver:
    """Return the observer of the request that the current context works for."""
    return _CURRENT.get(_UNOBSERVED)


def observe_with(observer: RequestObserver) -> None:
    """Set the observer of this context, and of tasks started in it."""
    _CURRENT.set(observer)


class RequestObservers:
    """Make the observers of a gateway's requests."""

    def __init__(
        self,
        clock: Clock,
        calls: CallMetrics | None = None,
        sessions: SessionMetrics | None = None,
    ) -> None:
        """Count nothing without metrics."""
        self._clock = clock
        self._calls = calls
        self._sessions = sessions

    @contextmanager
    def stream(
        self,
        request: pb.GenerateRequest | pb.ResumeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
        model: str,
        address: str,
    ) -> Iterator[RequestObserver]:
        """Observe a call of Generate or Resume; `model` is the served one, `address` the server's."""
        trace, operation = request_observer().trace, operation_of(request)
        trace.received(request, model, address)
        requested = request.model if isinstance(request, pb.GenerateRequest) else None
        call = Call(self._clock, context, operation, requested, trace.context, self._calls)
        observer = RequestObserver(trace, call, self._sessions, operation)
        observe_with(observer)
        try:
            yield observer
        except BaseException as error:
            call.ended(error)
            raise
        call.ended(None)

    def unary(self) -> None:
        """Observe any other call."""
        observe_with(RequestObserver(request_observer().trace, sessions=self._sessions))

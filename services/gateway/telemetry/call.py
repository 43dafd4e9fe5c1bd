"""A call that streams an answer: how it ends, whose fault that is, and how long its client waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context

import grpc
from opentelemetry.trace import SpanContext

from galley.common.logs import get_logger, level_of
from galley.common.metrics import catalogue
from galley.common.metrics.labels import CALLER_FAULT, ENDS, NO_FAULT, OK, SERVER_FAULT
from galley.common.metrics.metric import OTHER
from galley.common.metrics.registry import Registry, span_ref
from galley.common.wire.status import code_of, error_type
from galley.core.admission.admission import OWN_STREAMS, OWN_TOKENS
from galley.core.answer.answer import Chunk, Ending, NumericsChanged
from galley.core.errors import CallerFault, DeadlinePassed, InvalidField, Overloaded, Unimplemented
from galley.core.names import GALLEY
from galley.core.session import events as ev
from galley.core.session.events import Clock
from galley.core.session.machine import Session
from galley.core.store import StoredSession
from services.gateway.client_call import ClientCall, once
from services.gateway.clock import SECOND
from services.gateway.telemetry.attributes import stored_operation

STALL_NS = 1 * SECOND
"""A client has stalled if it took a message only after this time."""

_OWN_LIMITS = frozenset({OWN_STREAMS, OWN_TOKENS})
_log = get_logger(__name__)


class CallMetrics:
    def __init__(self, registry: Registry, model: str) -> None:
        self.model = model
        self.durations = registry.distribute(catalogue.REQUEST_DURATION)
        self.first_tokens = registry.distribute(catalogue.TIME_TO_FIRST_TOKEN)
        self.later_tokens = registry.distribute(catalogue.TIME_PER_OUTPUT_TOKEN)
        self.streams = registry.count(catalogue.STREAMS)
        self.resumes = registry.count(catalogue.RESUMES)
        self.rejected = registry.count(catalogue.ADMISSION_REJECTED)


class Call:
    """Record one call; count and log its end once, however it ends.

    `stalled_ns` adds up the times for which the client stalled. `error` is what the call ends with, if its
    handler will only see a cancellation.
    """

    def __init__(
        self,
        clock: Clock,
        client: ClientCall,
        operation: str,
        model: str | None,
        span: SpanContext,
        metrics: CallMetrics | None = None,
    ) -> None:
        """`model` is the requested one, None if a session is resumed; `span` is the call's, for exemplars."""
        self.stalled_ns = 0
        self.error: BaseException | None = None
        self._clock = clock
        self._operation = operation
        self._model = model
        self._span = span
        self._metrics = metrics
        self._session: Session | None = None
        self._is_new = False
        self._ending: Ending | None = None
        self._has_ended = False
        self._started_ns = clock.now_ns()
        self._first_ns = self._last_ns = 0
        self._later_tokens = 0
        remaining_s = client.time_remaining()
        self._deadline_ns = None if remaining_s is None else self._started_ns + int(remaining_s * SECOND)
        # gRPC may drop the handler of a client that left without resuming it, but it always calls back;
        # the log line of that needs the trace ids of this context.
        run = copy_context().run
        client.add_done_callback(once(lambda _: run(self.ended, asyncio.CancelledError())))

    def not_admitted(self, reason: str) -> None:
        if self._metrics is not None:
            self._metrics.rejected.at(reason).value += 1

    def opened(self, session: Session, stored: StoredSession, *, is_new: bool) -> None:
        """Note the session, which keeps the operation that it was created with."""
        self._session = session
        self._is_new = is_new
        self._operation = stored_operation(stored.fields)

    def sending(self, item: Chunk | NumericsChanged | ev.End) -> None:
        if isinstance(item, ev.End):
            self._ending = item.ending
        elif isinstance(item, Chunk):
            self._last_ns = self._clock.now_ns()
            if self._first_ns:
                self._later_tokens += len(item.tokens)
                return
            self._first_ns = self._last_ns
            if self._metrics is not None and self._is_new:
                cell = self._metrics.first_tokens.at(*self._labels(self._metrics), self._metrics.model)
                cell.observe((self._first_ns - self._started_ns) / SECOND, span_ref(self._span))

    def ended(self, error: BaseException | None) -> None:
        """Count and log the end, with what the handler raised."""
        if self._has_ended:
            return
        self._has_ended = True
        now = self._clock.now_ns()
        error = self._cause(error, now)
        duration_ns = now - self._started_ns
        outcome, fault = end_of(error)
        if self._metrics is not None:
            self._count(self._metrics, outcome, fault, duration_ns)
        if self._session is not None:
            self._log_end(self._session, error, outcome, duration_ns)
            self._session = None  # cancelled timers keep their context, and so this object
        elif isinstance(error, Exception):
            log_rejected(error)

    def _cause(self, error: BaseException | None, now: int) -> BaseException | None:
        """Return what ended the call; a cancelled handler does not know why."""
        if not isinstance(error, asyncio.CancelledError | GeneratorExit):
            return error
        if self.error is not None:
            return self.error
        # gRPC rounds a deadline up on the wire: the client's own has passed a little earlier.
        if self._deadline_ns is not None and now >= self._deadline_ns - (now - self._started_ns) // 50:
            return DeadlinePassed("the deadline of the call has passed")
        return error

    def _count(self, metrics: CallMetrics, outcome: str, fault: str, duration_ns: int) -> None:
        labels, span = self._labels(metrics), span_ref(self._span)
        served = metrics.model if self._session is not None else ""
        failure = "" if outcome == OK else outcome
        metrics.durations.at(*labels, served, failure).observe(duration_ns / SECOND, span)
        metrics.streams.at(outcome, fault).value += 1
        if self._model is None:
            metrics.resumes.at(outcome).value += 1
        if outcome == OK and self._is_new and self._later_tokens:
            later_ns = max(0, self._last_ns - self._first_ns - self.stalled_ns)
            cell = metrics.later_tokens.at(*labels, metrics.model)
            cell.observe(later_ns / self._later_tokens / SECOND, span)

    def _labels(self, metrics: CallMetrics) -> tuple[str, str, str]:
        requested = metrics.model if self._model in {None, "", metrics.model} else OTHER
        return self._operation, GALLEY, requested

    def _log_end(self, session: Session, error: BaseException | None, outcome: str, duration_ns: int) -> None:
        failure = error if isinstance(error, Exception) else None
        facts: dict[str, object] = {} if failure is None else {"error": str(failure)}
        _log.log(
            level_of(failure),
            "stream finished",
            session_id=session.spec.session_id,
            reason="" if self._ending is None else self._ending.reason.value,
            prompt_tokens=len(session.spec.prompt),
            output_tokens=session.logged_output,
            ttft_ms=_ms(self._first_ns - self._started_ns) if self._first_ns else None,
            duration_ms=_ms(duration_ns),
            accepted=session.stats.accepted,
            status=outcome,
            **facts,
        )


def end_of(error: BaseException | None) -> tuple[str, str]:
    """Return how a call ended and whose fault that is, as label values of the catalogue.

    A full gateway is the server's fault, though its error is a CallerFault.
    """
    if error is None:
        return OK, NO_FAULT
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled", CALLER_FAULT
    is_callers = (
        error.reason in _OWN_LIMITS if isinstance(error, Overloaded) else isinstance(error, CallerFault)
    )
    end = error_type(error), CALLER_FAULT if is_callers else SERVER_FAULT
    return end if end in ENDS else ("internal", SERVER_FAULT)


@contextmanager
def logging_rejection(**facts: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log_rejected(error, **facts)
        raise


def log_rejected(error: Exception, **facts: object) -> None:
    """Log a rejected call, without the error's message: that may quote the request.

    Internal errors have a line of their own (`galley.common.wire.status`).
    """
    if code_of(error) is grpc.StatusCode.INTERNAL:
        return
    if isinstance(error, InvalidField | Unimplemented):
        facts["field"] = error.field
    if isinstance(error, Overloaded):
        facts["reason"] = error.reason
    _log.log(level_of(error), "request rejected", status=error_type(error), **facts)


def _ms(duration_ns: int) -> float:
    return round(duration_ns / 1_000_000, 1)

"""One call of Generate or Resume: when it sent messages and how it ended, for metrics and the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import grpc
from opentelemetry.trace import SpanContext

from galley.common.logs import get_logger, level_of
from galley.common.wire.status import code_of, error_type
from galley.core.answer.answer import Chunk, Ending, NumericsChanged
from galley.core.errors import DeadlinePassed, InvalidField, Overloaded, Unimplemented
from galley.core.session import events as ev
from galley.core.session.machine import Session
from galley.core.session.ports import Clock
from galley.core.store import StoredSession
from services.gateway.telemetry.attributes import stored_operation
from services.gateway.telemetry.call_metrics import CallMetrics, CallResult, end_of
from services.gateway.telemetry.request_trace import STALL_NS

_SECOND = 1_000_000_000
_MS = 1_000_000

_log = get_logger(__name__)


class Call:
    """Record one call; count and log its end once, however it ends."""

    def __init__(
        self,
        clock: Clock,
        context: grpc.aio.ServicerContext[Any, Any],
        operation: str,
        model: str | None,
        span: SpanContext,
        metrics: CallMetrics | None = None,
    ) -> None:
        """`model` is the requested one, None if a session is resumed; `span` is the call's, for exemplars."""
        self._clock = clock
        self._metrics = metrics
        self._result = CallResult(operation, model, span)
        self._session: Session | None = None
        self._ending: Ending | None = None
        self._error: BaseException | None = None
        self._has_ended = False
        self._started_ns = clock.now_ns()
        self._first_ns = self._last_ns = self._stalled_ns = 0
        self._later_tokens = 0
        remaining_s: Any = context.time_remaining()  # None where the call has no deadline
        self._deadline_ns = None if remaining_s is None else self._started_ns + int(remaining_s * _SECOND)
        # gRPC may drop the handler of a client that left without resuming it, but it always calls back;
        # the log line of that needs the trace ids of this context.
        run = copy_context().run
        context.add_done_callback(lambda _: run(self.ended, asyncio.CancelledError()))  # type: ignore[arg-type]  # the stubs want a class

    def not_admitted(self, reason: str) -> None:
        """Count a call that admission rejected."""
        if self._metrics is not None:
            self._metrics.not_admitted(reason)

    def opened(self, session: Session, stored: StoredSession, *, is_new: bool) -> None:
        """Note the session, which keeps the operation that it was created with."""
        self._session = session
        self._result.is_new = is_new
        self._result.operation = stored_operation(stored.fields)

    def sending(self, item: Chunk | NumericsChanged | ev.End) -> None:
        """Note an item that is handed to the client's transport."""
        if isinstance(item, ev.End):
            self._ending = item.ending
        elif isinstance(item, Chunk):
            self._last_ns = self._clock.now_ns()
            if self._first_ns:
                self._later_tokens += len(item.tokens)
                return
            self._first_ns = self._last_ns
            if self._metrics is not None and self._result.is_new:
                self._metrics.first_token(self._result, self._first_ns - self._started_ns)

    def sent(self, waited_ns: int) -> None:
        """Add up the times for which the client stalled."""
        if waited_ns >= STALL_NS:
            self._stalled_ns += waited_ns

    def failed(self, error: BaseException) -> None:
        """Note the error that the call ends with, if its handler will only see a cancellation."""
        self._error = error

    def ended(self, error: BaseException | None) -> None:
        """Count and log the end, with what the handler raised."""
        if self._has_ended:
            return
        self._has_ended = True
        now = self._clock.now_ns()
        error = self._cause(error, now)
        result = self._result
        result.outcome, result.fault = end_of(error)
        result.has_session = self._session is not None
        result.duration_ns = now - self._started_ns
        result.later_tokens = self._later_tokens
        result.later_ns = max(0, self._last_ns - self._first_ns - self._stalled_ns)
        if self._metrics is not None:
            self._metrics.ended(result)
        if self._session is not None:
            self._log_end(self._session, error)
        elif isinstance(error, Exception):
            log_rejected(error)

    def _cause(self, error: BaseException | None, now: int) -> BaseException | None:
        """Return what ended the call; a cancelled handler does not know why."""
        if not isinstance(error, asyncio.CancelledError | GeneratorExit):
            return error
        if self._error is not None:
            return self._error
        if self._deadline_ns is not None and now >= self._deadline_ns:
            return DeadlinePassed("the deadline of the call has passed")
        return error

    def _log_end(self, session: Session, error: BaseException | None) -> None:
        failure = error if isinstance(error, Exception) else None
        reason = "" if self._ending is None else self._ending.reason.value
        facts: dict[str, object] = {} if failure is None else {"error": str(failure)}
        _log.log(
            level_of(failure),
            "stream finished",
            session_id=session.spec.session_id,
            reason=reason,
            prompt_tokens=len(session.spec.prompt),
            output_tokens=session.logged_output,
            ttft_ms=_ms(self._first_ns - self._started_ns) if self._first_ns else None,
            duration_ms=_ms(self._result.duration_ns),
            accepted=session.stats.accepted,
            status=self._result.outcome,
            **facts,
        )


@contextmanager
def logging_rejection(**facts: object) -> Iterator[None]:
    """Log an error that ends a call before its work begins."""
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
    return round(duration_ns / _MS, 1)

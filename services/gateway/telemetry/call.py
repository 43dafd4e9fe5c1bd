"""A call that streams an answer: how it ends, whose fault that is, and how long its client waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass

import grpc
from opentelemetry.trace import SpanContext
from structlog.contextvars import bind_contextvars

from galley.common.logs import get_logger, level_of
from galley.common.metrics import catalogue
from galley.common.metrics.labels import CALLER_FAULT, DEADLINE_EXCEEDED, ENDS, NO_FAULT, OK, SERVER_FAULT
from galley.common.metrics.metric import OTHER
from galley.common.metrics.registry import Registry, span_ref
from galley.common.wire.status import code_of, error_type, message_of
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

LATE_NS = 1 * SECOND
"""A call that its client cancels sooner, without a token, says nothing of the time to first token."""
VALUE = ", got"
"""What precedes the caller's value in the message of an error; a colon may follow."""
_LONGEST_METHOD = 128
_OWN_LIMITS = frozenset({OWN_STREAMS, OWN_TOKENS})
_log = get_logger(__name__)


class CallMetrics:
    def __init__(self, registry: Registry) -> None:
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
        served: str,
        metrics: CallMetrics | None = None,
    ) -> None:
        """`model` is the requested one, None if a session is resumed; `span` is the call's, for exemplars.

        `served` is the served model. The call's line in the log is written here, at its end.
        """
        self.stalled_ns = 0
        self.error: BaseException | None = None
        self._clock = clock
        self._operation = operation
        self._model = model
        self._span = span
        self._served = served
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
        if (line := _LINE.get()) is not None:
            line.is_taken = True
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
                cell = self._metrics.first_tokens.at(*self._labels(), self._answering)
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
            self._count(self._metrics, outcome, fault, now)
        _log_call(error, outcome, duration_ns, {"model": self._answering, **self._facts(error)})
        self._session = None  # cancelled timers keep their context, and so this object

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

    def _count(self, metrics: CallMetrics, outcome: str, fault: str, now: int) -> None:
        duration_ns = now - self._started_ns
        labels, span = self._labels(), span_ref(self._span)
        served = self._answering if self._session is not None else ""
        failure = "" if outcome == OK else outcome
        metrics.durations.at(*labels, served, failure).observe(duration_ns / SECOND, span)
        metrics.streams.at(outcome, fault).value += 1
        if self._model is None:
            metrics.resumes.at(outcome).value += 1
        is_late = outcome == DEADLINE_EXCEEDED
        if not self._is_new:
            return
        gave_up = outcome == "cancelled" and duration_ns > LATE_NS
        if (is_late or gave_up) and not self._first_ns:
            metrics.first_tokens.at(*labels, served).observe(duration_ns / SECOND, span)
        elif is_late or (outcome == OK and self._later_tokens):
            end_ns = now if is_late else self._last_ns
            tokens = self._later_tokens + is_late  # the one that did not come
            later_ns = max(0, end_ns - self._first_ns - self.stalled_ns)
            metrics.later_tokens.at(*labels, served).observe(later_ns / tokens / SECOND, span)

    @property
    def _answering(self) -> str:
        """Return the name of the session's LoRA adapter, or of the served model."""
        return self._served if self._session is None else self._session.spec.lora or self._served

    def _labels(self) -> tuple[str, str, str]:
        is_served = self._session is not None or self._model in {None, "", self._served}
        return self._operation, GALLEY, self._answering if is_served else OTHER

    def _facts(self, error: BaseException | None) -> dict[str, object]:
        session = self._session
        if session is None:
            return dict(failure_of(error).facts) if isinstance(error, Exception) else {}
        return {
            "session_id": session.spec.session_id,
            "reason": "" if self._ending is None else self._ending.reason.value,
            "prompt_tokens": len(session.spec.prompt),
            "output_tokens": session.logged_output,
            "rounds": session.stats.rounds,
            "accepted": session.stats.accepted,
            "ttft_ms": _ms(self._first_ns - self._started_ns) if self._first_ns else None,
            **({"error": str(error).partition(VALUE)[0]} if isinstance(error, Exception) else {}),
        }


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


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a call: its status, and what its caller was told, without values of the request."""

    status: grpc.StatusCode = grpc.StatusCode.OK
    field: str = ""
    message: str = ""
    reason: str = ""

    @property
    def facts(self) -> dict[str, str]:
        facts = {"field": self.field, "reason": self.reason, "error": self.message}
        return {name: value for name, value in facts.items() if value}


def failure_of(error: BaseException) -> Failure:
    """Describe an error, without the part of its message that repeats a value: that may be text."""
    return Failure(
        code_of(error),
        error.field if isinstance(error, InvalidField | Unimplemented) else "",
        message_of(error).partition(VALUE)[0],
        error.reason if isinstance(error, Overloaded) else "",
    )


class _Line:
    """The line of a call in the log, unless the observer of its stream writes it."""

    is_taken = False


_LINE: ContextVar[_Line | None] = ContextVar("call_line", default=None)


@contextmanager
def logging_call(method: str, describe: Callable[[BaseException], Failure] = failure_of) -> Iterator[None]:
    """Write one line for a call of `method`, with its status and duration, unless a `Call` does so."""
    bind_contextvars(method=method[:_LONGEST_METHOD])
    line, began_ns = _Line(), time.monotonic_ns()
    _LINE.set(line)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if not line.is_taken:
            end = Failure(grpc.StatusCode.CANCELLED)
            if error is None:
                end = Failure()
            elif isinstance(error, Exception):
                end = describe(error)
            # An error that HTTP describes otherwise than as its own status is the caller's.
            cause = error if error is not None and code_of(error) is end.status else None
            _log_call(cause, end.status.name.lower(), time.monotonic_ns() - began_ns, end.facts)


def _log_call(
    error: BaseException | None, status: str, duration_ns: int, facts: Mapping[str, object]
) -> None:
    level = level_of(error if isinstance(error, Exception) else None)
    _log.log(level, "call finished", status=status, duration_ms=_ms(duration_ns), **facts)


def _ms(duration_ns: int) -> float:
    return round(duration_ns / 1_000_000, 1)

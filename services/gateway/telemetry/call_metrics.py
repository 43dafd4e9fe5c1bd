"""What a gateway counts of calls: how they end, whose fault that is, and how long clients waited."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from opentelemetry.trace import INVALID_SPAN_CONTEXT, SpanContext

from galley.common.metrics import catalogue
from galley.common.metrics.cells import SpanRef, span_ref
from galley.common.metrics.labels import CALLERS, ENDS, NOBODYS, OK, OURS
from galley.common.metrics.metric import OTHER
from galley.common.metrics.registry import Registry
from galley.common.wire.status import error_type
from galley.core.admission.admission import OWN_STREAMS, OWN_TOKENS
from galley.core.answer.answer import Chunk, NumericsChanged
from galley.core.errors import CallerFault, DeadlinePassed, Overloaded
from galley.core.names import GALLEY
from galley.core.session.ports import Clock
from services.gateway.session.timeouts import SECOND
from services.gateway.telemetry.meter import CallMeter, StreamMeter

_OWN_LIMITS = frozenset({OWN_STREAMS, OWN_TOKENS})


class Calls:
    """The cells of all calls; `model` is the name of the served one."""

    def __init__(self, registry: Registry, clock: Clock, model: str) -> None:
        self.clock = clock
        self.model = model
        self.durations = registry.distribute(catalogue.REQUEST_DURATION)
        self.first_tokens = registry.distribute(catalogue.TIME_TO_FIRST_TOKEN)
        self.later_tokens = registry.distribute(catalogue.TIME_PER_OUTPUT_TOKEN)
        self.streams = registry.count(catalogue.STREAMS)
        self.resumes = registry.count(catalogue.RESUMES)


class CountingCallMeter(CallMeter):
    """Counts one call, once, however it is told of its end."""

    def __init__(
        self,
        of: Calls,
        context: grpc.aio.ServicerContext[Any, Any],
        *,
        operation: str,
        model: str | None,
    ) -> None:
        """`model` is the one asked for, None where a session is resumed."""
        self._of = of
        self._began_ns = of.clock.now_ns()
        remaining_s: Any = context.time_remaining()  # None where the call has no deadline
        self._deadline_ns = None if remaining_s is None else self._began_ns + int(remaining_s * SECOND)
        self._is_resume = model is None
        asked = of.model if model in {None, "", of.model} else OTHER
        self._labels = (operation, GALLEY, asked)
        self._stream: StreamMeter | None = None
        self._is_new = False
        self._traced = INVALID_SPAN_CONTEXT
        self._span: SpanRef | None = None
        self._error: BaseException | None = None
        self._over = False
        self._first_ns = self._last_ns = 0
        self._tokens = 0
        # A handler may be left without a word when its client goes; the call's end is always told.
        context.add_done_callback(self._call_ended)  # type: ignore[arg-type]  # the stubs want a class

    def traced(self, span: SpanContext) -> None:
        """See `CallMeter`."""
        self._traced, self._span = span, span_ref(span)

    def began(self, stream: StreamMeter, *, is_new: bool, operation: str) -> None:
        """See `CallMeter`."""
        self._stream, self._is_new = stream, is_new
        self._labels = (operation, *self._labels[1:])
        stream.traced(self._traced)

    def sends(self, item: Chunk | NumericsChanged) -> None:
        """See `CallMeter`."""
        if not isinstance(item, Chunk):
            return
        self._last_ns = self._of.clock.now_ns()
        self._tokens += len(item.tokens)
        if not self._first_ns:
            self._first_ns = self._last_ns
            self._tokens = 0  # those of the first message came at once
            if self._is_new:
                waited_s = (self._first_ns - self._began_ns) / SECOND
                self._of.first_tokens.at(*self._labels, self._of.model).observe(waited_s, self._span)

    def failed(self, error: BaseException) -> None:
        """See `CallMeter`."""
        self._error = error

    def end(self, error: BaseException | None) -> None:
        """It is over, with what its handler raised."""
        if self._over:
            return
        self._over = True
        now = self._of.clock.now_ns()
        outcome, fault = end_of(self._fault(error, now))
        answered = self._of.model if self._stream is not None else ""
        duration = self._of.durations.at(*self._labels, answered, "" if outcome == OK else outcome)
        duration.observe((now - self._began_ns) / SECOND, self._span)
        self._of.streams.at(outcome, fault).value += 1
        if self._is_resume:
            self._of.resumes.at(outcome).value += 1
        if outcome == OK and self._is_new and self._tokens:
            self._count_pace()

    def _count_pace(self) -> None:
        stalled_ns = 0 if self._stream is None else self._stream.stalled_ns
        took_ns = max(0, self._last_ns - self._first_ns - stalled_ns)
        pace = self._of.later_tokens.at(*self._labels, self._of.model)
        pace.observe(took_ns / self._tokens / SECOND, self._span)

    def _fault(self, error: BaseException | None, now: int) -> BaseException | None:
        """What ended it: a handler that is cancelled does not know why."""
        if not isinstance(error, asyncio.CancelledError | GeneratorExit):
            return error
        if self._error is not None:
            return self._error
        if self._deadline_ns is not None and now >= self._deadline_ns:
            return DeadlinePassed("the deadline of the call has passed")
        return error

    def _call_ended(self, ctx: object, /) -> None:  # noqa: ARG002  # the shape that grpc calls
        self.end(asyncio.CancelledError())


def end_of(error: BaseException | None) -> tuple[str, str]:
    """How a call ended, and whose fault that is, as the catalogue has it."""
    if error is None:
        return OK, NOBODYS
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled", CALLERS
    end = error_type(error), CALLERS if _is_callers(error) else OURS
    return end if end in ENDS else ("internal", OURS)


def _is_callers(error: BaseException) -> bool:
    """A gateway without room is not the caller's fault, though it is told to come back."""
    if isinstance(error, Overloaded):
        return error.reason in _OWN_LIMITS
    return isinstance(error, CallerFault)

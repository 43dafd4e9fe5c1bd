"""Metrics of calls: how they end, whose fault that is, and how long clients wait."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from opentelemetry.trace import SpanContext

from galley.common.metrics import catalogue
from galley.common.metrics.cells import span_ref
from galley.common.metrics.labels import CALLER_FAULT, ENDS, NO_FAULT, OK, SERVER_FAULT
from galley.common.metrics.metric import OTHER
from galley.common.metrics.registry import Registry
from galley.common.wire.status import error_type
from galley.core.admission.admission import OWN_STREAMS, OWN_TOKENS
from galley.core.errors import CallerFault, Overloaded
from galley.core.names import GALLEY

_SECOND = 1e9
_OWN_LIMITS = frozenset({OWN_STREAMS, OWN_TOKENS})


@dataclass(slots=True)
class CallResult:
    """The counted outcome of one call; `model` is the requested one, None for a resume."""

    operation: str
    model: str | None
    span: SpanContext
    is_new: bool = False
    has_session: bool = False
    outcome: str = OK
    fault: str = NO_FAULT
    duration_ns: int = 0
    later_tokens: int = 0  # those after the first message
    later_ns: int = 0  # from the first message to the last, without stalls of the client


class CallMetrics:
    """Count calls; `model` is the name of the served one."""

    def __init__(self, registry: Registry, model: str) -> None:
        self._model = model
        self._durations = registry.distribute(catalogue.REQUEST_DURATION)
        self._first_tokens = registry.distribute(catalogue.TIME_TO_FIRST_TOKEN)
        self._later_tokens = registry.distribute(catalogue.TIME_PER_OUTPUT_TOKEN)
        self._streams = registry.count(catalogue.STREAMS)
        self._resumes = registry.count(catalogue.RESUMES)
        self._rejected = registry.count(catalogue.ADMISSION_REJECTED)

    def not_admitted(self, reason: str) -> None:
        """Count a call that admission rejected."""
        self._rejected.at(reason).value += 1

    def first_token(self, call: CallResult, waited_ns: int) -> None:
        """Observe the time to the first message of a new session."""
        cell = self._first_tokens.at(*self._labels(call), self._model)
        cell.observe(waited_ns / _SECOND, span_ref(call.span))

    def ended(self, call: CallResult) -> None:
        """Count a call that has ended."""
        labels, span = self._labels(call), span_ref(call.span)
        served = self._model if call.has_session else ""
        error = "" if call.outcome == OK else call.outcome
        self._durations.at(*labels, served, error).observe(call.duration_ns / _SECOND, span)
        self._streams.at(call.outcome, call.fault).value += 1
        if call.model is None:
            self._resumes.at(call.outcome).value += 1
        if call.outcome == OK and call.is_new and call.later_tokens:
            cell = self._later_tokens.at(*labels, self._model)
            cell.observe(call.later_ns / call.later_tokens / _SECOND, span)

    def _labels(self, call: CallResult) -> tuple[str, str, str]:
        requested = self._model if call.model in {None, "", self._model} else OTHER
        return call.operation, GALLEY, requested


def end_of(error: BaseException | None) -> tuple[str, str]:
    """Return how a call ended and whose fault that is, as label values of the catalogue."""
    if error is None:
        return OK, NO_FAULT
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        return "cancelled", CALLER_FAULT
    end = error_type(error), CALLER_FAULT if _is_callers(error) else SERVER_FAULT
    return end if end in ENDS else ("internal", SERVER_FAULT)


def _is_callers(error: BaseException) -> bool:
    """Return True for the caller's faults; a full gateway is ours, though its error is a CallerFault."""
    if isinstance(error, Overloaded):
        return error.reason in _OWN_LIMITS
    return isinstance(error, CallerFault)

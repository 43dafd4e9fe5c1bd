"""Spans of one request and of the calls that it makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Self

from opentelemetry import context as current
from opentelemetry import trace
from opentelemetry.trace import SpanContext, SpanKind
from opentelemetry.util.types import AnyValue, Attributes

from galley.common.tracing.light_spans import Completer, LightSpan, SpanScope
from galley.common.tracing.telemetry import fail, traceparent_of
from galley.common.wire.status import error_type
from galley.core import names
from galley.core.errors import StoreUnavailable
from galley.core.session.ports import Clock

COMMIT = "commit"
RENEW = "renew"

SLOW_COMMIT_NS = 5_000_000
"""Only slower commits get a span: nearly every round has a commit, and its span has the duration."""

_SPAN_ID_INDEX = len("00-") + 32 + len("-")


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The recorded rounds (`slow` means longer than `slow_ns`), and whether text is recorded."""

    rounds: Literal["all", "slow", "none"] = "all"
    slow_ns: int = 250_000_000
    content: bool = False


@dataclass(frozen=True, slots=True)
class TraceStart:
    """The start of a request's trace: `context` is its span's, `parent` the caller's.

    `offset_ns` is Unix time minus the clock's time. `start_ns` is in Unix time.
    """

    scope: SpanScope
    options: TraceOptions
    context: SpanContext
    parent: SpanContext | None
    clock: Clock
    offset_ns: int
    start_ns: int
    attributes: dict[str, AnyValue] = field(default_factory=dict)

    def now_ns(self) -> int:
        return self.clock.now_ns() + self.offset_ns


class RequestSpan:
    """The span of a sampled request. Times are Unix nanoseconds."""

    def __init__(self, start: TraceStart, span: trace.Span) -> None:
        """Make `span` the current one."""
        self.span = span
        self.context = span.get_span_context()
        self.traceparent = traceparent_of(self.context)
        self.clock_ns = start.clock.now_ns
        self.offset_ns = start.offset_ns
        self.new_id = start.scope.new_span_id
        self._begin = start.scope.begin
        self._trace_id, self._id = self.context.trace_id, self.context.span_id
        self._state = self.context.trace_state
        self._traceparent_prefix = self.traceparent[:_SPAN_ID_INDEX]
        current.attach(trace.set_span_in_context(span))  # each call runs in a context of its own

    def now_ns(self) -> int:
        return self.clock_ns() + self.offset_ns

    def event(self, name: str, attributes: Attributes = None, at_ns: int | None = None) -> None:
        self.span.add_event(name, attributes, self.now_ns() if at_ns is None else at_ns)

    def child(
        self,
        name: str,
        start_ns: int,
        *,
        span_id: int = 0,
        parent_id: int = 0,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: dict[str, AnyValue] | None = None,
        completer: Completer | None = None,
    ) -> LightSpan:
        """Start a span below this one, or below `parent_id`; with `span_id` if it was drawn before."""
        span_id = span_id or self.new_id()
        span = self._begin(
            name, kind, self._trace_id, span_id, parent_id or self._id, start_ns, completer, attributes
        )
        if self._state:
            span.trace_state = self._state
        return span

    def child_traceparent(self, span: LightSpan) -> str:
        return f"{self._traceparent_prefix}{span.span_id:016x}-01"


class CallSpan:
    """The span of a request to a replica; `traceparent` is sent with it."""

    __slots__ = ("_failed", "_request", "_span", "traceparent")

    def __init__(
        self, traceparent: str = "", span: LightSpan | None = None, request: RequestSpan | None = None
    ) -> None:
        """Record nothing if `span` is None."""
        self.traceparent = traceparent
        self._span = span
        self._request = request
        self._failed = False

    def failed(self, kind: str) -> None:
        """Record a gRPC status in lower case; only the first counts."""
        if self._span is not None and not self._failed:
            self._failed = True
            fail(self._span, kind)

    def end(self) -> None:
        if self._span is not None and self._request is not None:
            self._span.end(self._request.now_ns())


class StoreCall:
    """The span of a call to the session store with its retries; keys and values are not recorded.

    Record nothing if `request` is None.
    """

    __slots__ = ("_operation", "_request", "_retries", "_start_ns")

    def __init__(self, request: RequestSpan | None, operation: str, start_ns: int) -> None:
        self._request = request
        self._operation = operation
        self._start_ns = start_ns
        self._retries: list[tuple[int, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.end(error)

    def retried(self, error: StoreUnavailable) -> None:
        if self._request is not None:
            self._retries.append((self._request.now_ns(), error.public_message))

    def end(self, error: BaseException | None = None) -> None:
        """End the span; a cancelled call did not fail."""
        request, failed = self._request, isinstance(error, Exception)
        if request is None:
            return
        end_ns = request.now_ns()
        if not self._is_recorded(end_ns - self._start_ns, failed=failed):
            return
        span = request.child(
            f"{names.EVALSHA} {self._operation}",
            self._start_ns,
            kind=SpanKind.CLIENT,
            attributes={
                names.DB_SYSTEM: names.REDIS,
                names.DB_OPERATION: names.EVALSHA,
                names.STORE_OPERATION: self._operation,
            },
        )
        if self._retries:
            span.set_attribute(names.STORE_ATTEMPTS, len(self._retries) + 1)
        for at_ns, why in self._retries:
            span.add_event(names.STORE_RETRIED, {names.REASON: why}, at_ns)
        if error is not None and failed:
            fail(span, error_type(error))
        span.end(end_ns)

    def _is_recorded(self, took_ns: int, *, failed: bool) -> bool:
        if self._operation == RENEW:
            return failed
        return failed or bool(self._retries) or took_ns > SLOW_COMMIT_NS or self._operation != COMMIT

"""The spans of what is asked of others for a request: of a draft or a target, and of the store."""

from __future__ import annotations

from opentelemetry.trace import SpanKind

from galley.common.tracing.light_spans import LeanSpan
from galley.common.tracing.telemetry import fail
from galley.common.wire.status import error_type
from galley.core import names
from galley.core.errors import StoreUnavailable
from services.gateway.telemetry.own_span import RequestSpan

COMMIT = "commit"
RENEW = "renew"

SLOW_COMMIT_NS = 5_000_000
"""There is a commit for nearly every round, which says itself how long it took; only others are spans too."""


class CallSpan:
    """An item at a replica; `traceparent` goes with it."""

    __slots__ = ("_failed", "_request", "_span", "traceparent")

    def __init__(
        self, traceparent: str = "", span: LeanSpan | None = None, request: RequestSpan | None = None
    ) -> None:
        """Without a span, which is beneath that of `request`, nothing is told of it."""
        self.traceparent = traceparent
        self._span = span
        self._request = request
        self._failed = False

    def failed(self, kind: str) -> None:
        """`kind` is a gRPC status in lower case; of several, the first counts."""
        if self._span is not None and not self._failed:
            self._failed = True
            fail(self._span, kind)

    def end(self) -> None:
        """It is over; once."""
        if self._span is not None and self._request is not None:
            self._span.end(self._request.clock_ns() + self._request.offset_ns)


class StoreCall:
    """A call to the store, its repetitions included; nothing that it brings or takes is told."""

    def __init__(self, request: RequestSpan, operation: str, start_ns: int) -> None:
        self._request = request
        self._operation = operation
        self._start_ns = start_ns
        self._retries: list[tuple[int, str]] = []

    def retried(self, error: StoreUnavailable) -> None:
        """It has failed, and is repeated."""
        self._retries.append((self._request.now_ns(), error.told))

    def end(self, error: BaseException | None = None) -> None:
        """It is over; whoever gave it up by being cancelled did not fail."""
        failed = isinstance(error, Exception)
        end_ns = self._request.now_ns()
        if not self._is_told(end_ns - self._start_ns, failed=failed):
            return
        span = self._request.child(
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

    def _is_told(self, took_ns: int, *, failed: bool) -> bool:
        if self._operation == RENEW:
            return failed
        return failed or bool(self._retries) or took_ns > SLOW_COMMIT_NS or self._operation != COMMIT

"""The W3C trace context of the caller, where OpenTelemetry is in use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from galley.core.names import FORCE_KEY, FORCE_VALUE

Metadata: TypeAlias = tuple[tuple[str, str], ...]

_T = TypeVar("_T")


class CallerTrace:
    """The trace context in which a stream was requested; its retries are made in the same context."""

    def __init__(self, *, force: bool) -> None:
        """Take the current context. `force` makes the gateways trace the request whatever they sample."""
        self._context = _otel_context().get_current() if _in_use() else None
        self._forced = ((FORCE_KEY, FORCE_VALUE),) if force else ()

    def call(self, make: Callable[[Metadata], _T]) -> _T:
        """Return `make(metadata)`, called in that context."""
        if self._context is None:
            return make(self._forced)
        token = _otel_context().attach(self._context)
        try:
            return make((*w3c_metadata(), *self._forced))
        finally:
            _otel_context().detach(token)


def w3c_metadata() -> Metadata:
    """Return the metadata that carries the current trace; empty outside of a trace."""
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415  # may not be installed
        TraceContextTextMapPropagator,
    )

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())


def _in_use() -> bool:
    # A caller that has never imported OpenTelemetry has no span, and need not wait for the import.
    return "opentelemetry.context" in sys.modules


def _otel_context() -> Any:
    from opentelemetry import context  # noqa: PLC0415  # may not be installed

    return context

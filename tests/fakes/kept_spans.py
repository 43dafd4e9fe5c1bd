"""What a gateway of a test tells of its requests: kept in memory, as an exporter is given it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.server.server import Parts
from galley.common.tracing.telemetry import telemetry_to
from galley.core import names
from galley.core.session.ports import Clock
from services.gateway.telemetry.observer import RequestObserver, observe_with
from services.gateway.telemetry.request_trace import RequestTrace
from services.gateway.telemetry.spans import TraceOptions, TraceStart
from tests.fakes.waiting import Watch

MS = 1_000_000
OFFSET_NS = 1_700_000_000_000 * MS
"""What the clocks of tests are behind Unix time."""


class KeptSpans(SpanExporter):
    """Of all services that are started with `parts`."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self._watch = Watch()

    def parts(self, service: str = GATEWAY, metrics: Registry | None = None) -> Parts:
        """Sampled as the environment says when this is called."""
        return Parts(telemetry=telemetry_to(SimpleSpanProcessor(self), f"galley-{service}"), metrics=metrics)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        self._watch.changed()
        return SpanExportResult.SUCCESS

    async def has(self, name: str, count: int) -> None:
        """Wait until so many spans of this name have ended."""
        await self._watch.until(lambda: sum(span.name == name for span in self.spans) >= count)

    async def requests(self, count: int = 1) -> list[ReadableSpan]:
        """Those that have ended, once there are so many."""
        await self._watch.until(lambda: len(self._requests()) >= count)
        return self._requests()

    def _requests(self) -> list[ReadableSpan]:
        return [span for span in self.spans if names.PROVIDER in told(span)]

    def rounds(self, request: ReadableSpan) -> list[ReadableSpan]:
        """In order."""
        found = [span for span in self.below(request) if span.name == names.ROUND]
        return sorted(found, key=lambda span: told(span)[names.ROUND_INDEX])

    def below(self, request: ReadableSpan) -> list[ReadableSpan]:
        """Of its trace, without itself."""
        found = [span for span in self.spans if span.context.trace_id == request.context.trace_id]
        return [span for span in found if span is not request]

    def events(self, request: ReadableSpan, name: str) -> list[dict[str, Any]]:
        """Of the request or of what is below it, in order of time."""
        found = [event for span in (request, *self.below(request)) for event in span.events]
        found.sort(key=lambda event: event.timestamp)
        return [dict(event.attributes or {}) for event in found if event.name == name]

    def must_hang_together(self, request: ReadableSpan) -> None:
        """No span names a parent that was not told."""
        known = {span.context.span_id for span in self.spans}
        for span in self.below(request):
            assert span.parent is not None, span.name
            assert span.parent.span_id in known, f"{span.name} is an orphan"


def traced_here(kept: KeptSpans, clock: Clock) -> RequestObserver:
    """A request, as if a call for it had come: what is done from now on is done for it."""
    scope = kept.parts().telemetry.scope("test")
    assert scope is not None
    context = scope.request(Context(), "test", {})
    start_ns = OFFSET_NS + clock.now_ns()
    attributes: dict[str, Any] = {names.PROVIDER: names.GALLEY}
    request = RequestTrace(
        TraceStart(scope, TraceOptions(), context, None, clock, OFFSET_NS, start_ns, attributes)
    )
    request.begin()
    observer = RequestObserver(request)
    observe_with(observer)
    return observer


def told(span: ReadableSpan) -> dict[str, Any]:
    """The attributes."""
    return dict(span.attributes or {})


def lasted_ns(span: ReadableSpan) -> int:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.end_time - span.start_time


def error_of(span: ReadableSpan) -> str | None:
    """Its error.type, which goes with the status of an error."""
    kind = told(span).get(names.ERROR_TYPE)
    assert (kind is not None) == (not span.status.is_unset)
    assert kind is None or isinstance(kind, str)
    return kind

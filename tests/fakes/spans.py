"""Spans kept in memory, as an exporter receives them, for tests to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.server.server import Parts
from galley.common.tracing.light_spans import Completer, LightSpan, SpanScope
from galley.common.tracing.telemetry import telemetry_to
from galley.core import names
from galley.core.session.events import Clock
from services.gateway.telemetry.observer import RequestObserver, observe_with
from services.gateway.telemetry.spans import TraceOptions, TraceStart
from tests.fakes.waiting import Watch

MS = 1_000_000
OFFSET_NS = 1_700_000_000_000 * MS
"""Unix time, in ns, at which the clock of a test reads 0."""


class KeptSpans(SpanExporter):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self._watch = Watch()

    def parts(self, service: str = GATEWAY, metrics: Registry | None = None) -> Parts:
        return Parts(telemetry=telemetry_to(SimpleSpanProcessor(self), f"galley-{service}"), metrics=metrics)

    @cached_property
    def scope(self) -> SpanScope:
        scope = self.parts("test").telemetry.scope("test")
        assert scope is not None
        return scope

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        self._watch.changed()
        return SpanExportResult.SUCCESS

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def of_session(self, name: str, session_id: str) -> ReadableSpan:
        (result,) = [span for span in self.named(name) if attributes_of(span)[names.SESSION_ID] == session_id]
        return result

    async def has(self, name: str, count: int) -> None:
        await self._watch.until(lambda: len(self.named(name)) >= count)

    async def requests(self, count: int = 1) -> list[ReadableSpan]:
        await self._watch.until(lambda: len(self._requests()) >= count)
        return self._requests()

    def _requests(self) -> list[ReadableSpan]:
        return [span for span in self.spans if names.PROVIDER in attributes_of(span)]

    def rounds(self, request: ReadableSpan) -> list[ReadableSpan]:
        results = [span for span in self.below(request) if span.name == names.ROUND]
        return sorted(results, key=lambda span: attributes_of(span)[names.ROUND_INDEX])

    def below(self, request: ReadableSpan) -> list[ReadableSpan]:
        results = [span for span in self.spans if span.context.trace_id == request.context.trace_id]
        return [span for span in results if span is not request]

    def events(self, request: ReadableSpan, name: str) -> list[dict[str, Any]]:
        results = [event for span in (request, *self.below(request)) for event in span.events]
        results.sort(key=lambda event: event.timestamp)
        return [dict(event.attributes or {}) for event in results if event.name == name]

    def must_hang_together(self, request: ReadableSpan) -> None:
        known = {span.context.span_id for span in self.spans}
        for span in self.below(request):
            assert span.parent is not None, span.name
            assert span.parent.span_id in known, f"{span.name} is an orphan"


def root(scope: SpanScope, name: str, completer: Completer | None = None) -> LightSpan:
    """Start a span without a parent, 1 ns after 1970."""
    ids = scope.new_trace_id(), scope.new_span_id(), 0
    return scope.begin(name, SpanKind.INTERNAL, *ids, 1, completer)


def traced_here(kept: KeptSpans, clock: Clock) -> RequestObserver:
    context = kept.scope.request(Context(), "test", {})
    start_ns = OFFSET_NS + clock.now_ns()
    attributes: dict[str, Any] = {names.PROVIDER: names.GALLEY}
    observer = RequestObserver(
        TraceStart(kept.scope, TraceOptions(), context, None, clock, OFFSET_NS, start_ns, attributes)
    )
    observer.begin()
    observe_with(observer)
    return observer


class NotedScope:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.scope = KeptSpans().scope
        begin = self.scope.begin

        def noting(name: str, *given: Any) -> LightSpan:
            self.names.append(name)
            return begin(name, *given)

        self.scope.begin = noting  # type: ignore[assignment]  # a partial of the same


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def lasted_ns(span: ReadableSpan) -> int:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.end_time - span.start_time


def error_of(span: ReadableSpan) -> str | None:
    kind = attributes_of(span).get(names.ERROR_TYPE)
    assert (kind is not None) == (not span.status.is_unset)
    assert kind is None or isinstance(kind, str)
    return kind


def parent_of(trace_id: int, *, sampled: bool = True) -> str:
    return f"00-{trace_id:032x}-{0xDEF:016x}-{int(sampled):02x}"


def links_of(span: ReadableSpan) -> set[tuple[int, int]]:
    results = [(link.context.trace_id, link.context.span_id) for link in span.links]
    assert len(set(results)) == len(results)
    assert all((link.attributes or {})["galley.link"] == "item" for link in span.links)
    return set(results)


def context_of(span: ReadableSpan) -> tuple[int, int]:
    context = span.context
    assert context is not None
    return context.trace_id, context.span_id


def events_of(span: ReadableSpan) -> Iterator[tuple[str, dict[str, Any]]]:
    for event in span.events:
        yield event.name, dict(event.attributes or {})

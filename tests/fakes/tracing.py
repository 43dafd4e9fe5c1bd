"""Traces as a test sees them: spans kept in memory, and a scope that tells whether it was asked for any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from galley.common.tracing.light_spans import LightSpan, SpanScope
from galley.common.tracing.telemetry import telemetry_to


class Kept:
    """The spans of its `scope` that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.scope = scope_to(self._exporter)

    def named(self, name: str) -> list[ReadableSpan]:
        """In the order in which they ended."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def of_session(self, name: str, session_id: str) -> ReadableSpan:
        """The one span of this name that is of the session."""
        (found,) = [
            span for span in self.named(name) if attributes_of(span)["galley.session.id"] == session_id
        ]
        return found


class Asked:
    """A `scope` that makes spans as any other, and the names of those that were wanted."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.scope = scope_to(InMemorySpanExporter())
        begin = self.scope.begin

        def noting(name: str, *given: Any) -> LightSpan:
            self.names.append(name)
            return begin(name, *given)

        self.scope.begin = noting  # type: ignore[assignment]  # a partial of the same


def scope_to(exporter: SpanExporter) -> SpanScope:
    scope = telemetry_to(SimpleSpanProcessor(exporter), "test").scope("test")
    assert scope is not None
    return scope


def parent_of(trace_id: int, *, sampled: bool = True) -> str:
    """The traceparent of span 0xDEF in this trace."""
    return f"00-{trace_id:032x}-{0xDEF:016x}-{int(sampled):02x}"


def attributes_of(span: ReadableSpan) -> Mapping[str, Any]:
    return span.attributes or {}


def links_of(span: ReadableSpan) -> set[tuple[int, int]]:
    """(trace id, span id) of each; none twice."""
    found = [(link.context.trace_id, link.context.span_id) for link in span.links]
    assert len(set(found)) == len(found)
    assert all((link.attributes or {})["galley.link"] == "item" for link in span.links)
    return set(found)


def context_of(span: ReadableSpan) -> tuple[int, int]:
    """(trace id, span id)."""
    context = span.context
    assert context is not None
    return context.trace_id, context.span_id


def events_of(span: ReadableSpan) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for event in span.events:
        yield event.name, dict(event.attributes or {})

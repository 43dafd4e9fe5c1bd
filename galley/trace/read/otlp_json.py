"""Spans in OTLP's JSON encoding.

It is protobuf's JSON mapping (camelCase, 64-bit integers as strings) except that ids are hexadecimal and
enums are numbers.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from sys import intern
from typing import TYPE_CHECKING, Any

from galley.trace.read.spans import Attributes, Event, Link, Process, Span, Value

if TYPE_CHECKING:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

SERVICE_NAME, SERVICE_INSTANCE = "service.name", "service.instance.id"
_IDS = ("traceId", "spanId", "parentSpanId")
_TRACE_DIGITS, _SPAN_DIGITS = 32, 16
# Longer attribute values are not interned.
_LONGEST_INTERNED = 64


class Malformed(ValueError):
    """The input is not a span in OTLP's JSON encoding."""


# ---------------------------------------------------------------------------------------- writing --


def drop_malformed(request: ExportTraceServiceRequest) -> int:
    """Remove spans with ids of a wrong length, their links' included; return how many."""
    dropped = 0
    for resource in request.resource_spans:
        for scope in resource.scope_spans:
            good = [span for span in scope.spans if _has_ids(span)]
            if len(good) < len(scope.spans):
                dropped += len(scope.spans) - len(good)
                del scope.spans[:]
                scope.spans.extend(good)
    return dropped


def _has_ids(span: OtlpSpan) -> bool:
    return (
        _is_named(span)
        and len(span.parent_span_id) in {0, _SPAN_DIGITS // 2}
        and all(_is_named(link) for link in span.links)
    )


def _is_named(holder: OtlpSpan | OtlpSpan.Link) -> bool:
    return len(holder.trace_id) == _TRACE_DIGITS // 2 and len(holder.span_id) == _SPAN_DIGITS // 2


def document_of(request: ExportTraceServiceRequest) -> dict[str, Any]:
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415  # readers need no protobuf

    document: dict[str, Any] = MessageToDict(request, use_integers_for_enums=True)
    for resource in document.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                for holder in (span, *span.get("links", ())):
                    holder.update((name, b64decode(holder[name]).hex()) for name in _IDS if name in holder)
    return document


# ---------------------------------------------------------------------------------------- reading --


def spans_in(document: Any, keep: Callable[[Any], bool] | None = None) -> Iterator[Span]:
    """Yield the spans whose JSON `keep` returns True for, without those that lack ids. Raises Malformed."""
    try:
        for resource in document.get("resourceSpans") or ():
            process = _process(resource.get("resource") or {})
            for scope in resource.get("scopeSpans") or ():
                for span in scope.get("spans") or ():
                    if span.get("traceId") and span.get("spanId") and (keep is None or keep(span)):
                        yield _read_span(span, process)
    except Malformed:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise Malformed(f"is not a list of spans in OTLP's JSON encoding ({error})") from error


def _process(resource: Mapping[str, Any]) -> Process:
    attributes = _read_attributes(resource)
    service, instance = attributes.get(SERVICE_NAME), attributes.get(SERVICE_INSTANCE)
    return Process(str(service or "unknown"), str(instance or ""))


def _read_span(span: Mapping[str, Any], process: Process) -> Span:
    status = span.get("status") or {}
    return Span(
        trace_id=intern(_id(span, "traceId", _TRACE_DIGITS)),
        span_id=_id(span, "spanId", _SPAN_DIGITS),
        parent_id=_id(span, "parentSpanId", _SPAN_DIGITS) if span.get("parentSpanId") else "",
        name=intern(_string(span, "name")),
        start_ns=_time(span, "startTimeUnixNano"),
        end_ns=_time(span, "endTimeUnixNano"),
        process=process,
        kind=int(span.get("kind") or 0),
        status=int(status.get("code") or 0),
        problem=_string(status, "message"),
        attributes=_read_attributes(span),
        events=tuple(_read_event(event) for event in span.get("events") or ()),
        links=tuple(_read_link(link) for link in span.get("links") or ()),
    )


def _read_event(event: Mapping[str, Any]) -> Event:
    return Event(intern(_string(event, "name")), _time(event, "timeUnixNano"), _read_attributes(event))


def _read_link(link: Mapping[str, Any]) -> Link:
    trace_id, span_id = _id(link, "traceId", _TRACE_DIGITS), _id(link, "spanId", _SPAN_DIGITS)
    return Link(trace_id, span_id, _read_attributes(link))


def _id(holder: Mapping[str, Any], name: str, digits: int) -> str:
    value = holder.get(name)
    if not isinstance(value, str) or len(value) != digits:
        raise Malformed(f"{name}: must be {digits} hexadecimal digits, is {value!r:.80}")
    bytes.fromhex(value)
    return value.lower()


def _time(holder: Mapping[str, Any], name: str) -> int:
    value = int(holder.get(name) or 0)
    if not 0 <= value < 2**64:
        raise Malformed(f"{name}: must be in [0, 2^64), is {value}")
    return value


def _string(holder: Mapping[str, Any], name: str) -> str:
    value = holder.get(name, "")
    if not isinstance(value, str):
        raise Malformed(f"{name}: must be a string, is {value!r:.80}")
    return _encodable(value)


def _encodable(text: str) -> str:
    """Replace lone surrogates, which JSON may hold and no file or terminal accepts."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _read_attributes(holder: Mapping[str, Any]) -> Attributes:
    pairs = holder.get("attributes")
    return {intern(_string(pair, "key")): _read_value(pair.get("value")) for pair in pairs} if pairs else {}


def _read_value(value: Mapping[str, Any] | None) -> Value:
    if not value:
        return None
    kind, held = next(iter(value.items()))
    reader = _READERS.get(kind)
    return None if reader is None else reader(held)


def _read_string(held: str) -> str:
    text = _encodable(held)
    return intern(text) if len(text) <= _LONGEST_INTERNED else text


def _read_int(held: Any) -> int:
    value = int(held)
    if not -(2**63) <= value < 2**63:
        raise Malformed("intValue: must be of 64 bits, is longer")
    return value


_READERS: Mapping[str, Callable[[Any], Value]] = {
    "stringValue": _read_string,
    "boolValue": bool,
    "intValue": _read_int,
    "doubleValue": float,
    "bytesValue": _read_string,
    "arrayValue": lambda held: tuple(_read_value(value) for value in held.get("values") or ()),
    "kvlistValue": lambda held: _read_attributes({"attributes": held.get("values")}),
}

"""Spans as OTLP says them, written at once: a message object for each attribute costs three times as much.

The bytes are an `opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest`; a test compares them with
what the SDK's own encoder makes. Numbers in comments are those of fields in its `.proto`.

Imports the SDK: to be imported where traces are on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from struct import pack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import Link, SpanContext, TraceState
    from opentelemetry.util.types import AnyValue

_SINGLE = [bytes([n]) for n in range(0x80)]
_LEAST_INT, _MOST_INT = -(2**63), 2**63 - 1
_OFTEN, _SHORT = 1024, 64
"""Numbers below, and texts up to it, are kept encoded."""
_HAS_REMOTE, _IS_REMOTE = 0x100, 0x200


def encoded(spans: Iterable[ReadableSpan]) -> bytes:
    """One request that holds all of them, by process and scope."""
    # By identity: what these objects are hashed by costs more than all else of a span.
    found: dict[tuple[int, int], list[ReadableSpan]] = {}
    for span in spans:
        found.setdefault((id(span.resource), id(span.instrumentation_scope)), []).append(span)
    return b"".join(_field(1, _of_scope(some)) for some in found.values())


def _of_scope(spans: Sequence[ReadableSpan]) -> bytes:
    """All are of one process and one scope."""
    resource, scope = spans[0].resource, spans[0].instrumentation_scope
    told = [_field(1, _scope(scope)), *(_field(2, _span(span)) for span in spans)]
    told.append(_text(3, scope.schema_url if scope else None))
    of_process = _field(1, _attributes(1, resource.attributes))
    return b"".join([of_process, _field(2, b"".join(told)), _text(3, resource.schema_url)])


def _scope(scope: InstrumentationScope | None) -> bytes:
    if scope is None:
        return b""
    return _text(1, scope.name) + _text(2, scope.version) + _attributes(3, scope.attributes)


def _span(span: ReadableSpan) -> bytes:
    context, parent, status = span.context, span.parent, span.status
    return b"".join(
        (
            _ids(context),
            _state(context.trace_state),
            b"" if parent is None else b"\x22\x08" + parent.span_id.to_bytes(8),  # 4
            _text(5, span.name),
            _number(6, span.kind.value + 1),
            pack("<BQBQ", 0x39, span.start_time or 0, 0x41, span.end_time or 0),  # 7, 8
            _attributes(9, span.attributes),
            _number(10, span.dropped_attributes),
            *(_field(11, _event(event)) for event in span.events),
            _number(12, span.dropped_events),
            *(_field(13, _link(link)) for link in span.links),
            _number(14, span.dropped_links),
            _field(15, _text(2, status.description) + _number(3, status.status_code.value)),
            b"\x85\x01" + _remote(parent),  # 16
        )
    )


def _event(event: Event) -> bytes:
    dropped = _number(4, event.dropped_attributes)
    return (
        b"\x09"
        + pack("<Q", event.timestamp)
        + _text(2, event.name)
        + _attributes(3, event.attributes)
        + dropped
    )


def _link(link: Link) -> bytes:
    dropped = _number(5, link.dropped_attributes)
    return (
        _ids(link.context) + _attributes(4, link.attributes) + dropped + b"\x35" + _remote(link.context)
    )  # 6


def _ids(context: SpanContext) -> bytes:
    return b"\x0a\x10" + context.trace_id.to_bytes(16) + b"\x12\x08" + context.span_id.to_bytes(8)  # 1, 2


def _state(state: TraceState) -> bytes:
    return _text(3, ",".join(f"{key}={value}" for key, value in state.items())) if state else b""


def _remote(parent: SpanContext | None) -> bytes:
    remote = parent is not None and parent.is_remote
    return pack("<I", _HAS_REMOTE | _IS_REMOTE if remote else _HAS_REMOTE)


def _attributes(number: int, attributes: Mapping[str, AnyValue] | None) -> bytes:
    return b"".join([_attribute(number, *item) for item in attributes.items()]) if attributes else b""


def _attribute(number: int, key: str, value: AnyValue) -> bytes:
    """Nothing of a number that OTLP cannot hold."""
    if (type(value) is int and 0 <= value < _OFTEN) or (isinstance(value, str) and len(value) <= _SHORT):
        return _common(number, key, value)
    if isinstance(value, int) and not _LEAST_INT <= value <= _MOST_INT:
        return b""
    return _field(number, _key(key) + _field(2, _value(value)))


@lru_cache(maxsize=4096)
def _common(number: int, key: str, value: AnyValue) -> bytes:
    """What comes again and again: names, addresses, small numbers."""
    return _field(number, _key(key) + _field(2, _value(value)))


@lru_cache(maxsize=1024)
def _key(key: str) -> bytes:
    return _field(1, key.encode())


def _value(value: AnyValue) -> bytes:
    """An AnyValue."""
    if value is None:
        return b""
    if isinstance(value, str):
        return _field(1, value.encode())
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + _varint(value & (2**64 - 1))
    if isinstance(value, float):
        return b"\x21" + pack("<d", value)
    if isinstance(value, bytes):
        return _field(7, value)
    if isinstance(value, Mapping):
        return _field(6, b"".join(_field(1, _key(str(k)) + _field(2, _value(v))) for k, v in value.items()))
    return _field(5, b"".join(_field(1, _value(item)) for item in value))


def _field(number: int, data: bytes) -> bytes:
    return _SINGLE[number << 3 | 2] + _varint(len(data)) + data


def _text(number: int, text: str | None) -> bytes:
    return _field(number, text.encode()) if text else b""


def _number(number: int, value: int) -> bytes:
    return _SINGLE[number << 3] + _varint(value) if value else b""


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _SINGLE[value]
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)

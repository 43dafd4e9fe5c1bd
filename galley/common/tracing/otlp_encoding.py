"""Our spans as OTLP says them, written at once: a message object for each attribute costs many times as much.

The bytes are an `opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest`; a test compares them with
what the SDK's own encoder makes. Numbers in comments are those of fields in its `.proto`.

Imports the SDK: to be imported where traces are on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from struct import pack
from threading import Lock

from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import Event
from opentelemetry.trace import SpanKind, TraceState
from opentelemetry.util.types import AnyValue

from galley.common.tracing.light_spans import LeanSpan, Linked, SpanScope

_LOG = logging.getLogger(f"opentelemetry.{__name__}")  # of the family that is heard once a minute
_SINGLE = [bytes([n]) for n in range(0x80)]
_LEAST_INT, _MOST_INT = -(2**63), 2**63 - 1
_OFTEN, _SHORT = 1024, 64
"""Numbers below, and texts up to it, are kept encoded."""
_LOCAL, _REMOTE = pack("<I", 0x100), pack("<I", 0x300)
_UNSET, _ERROR = b"\x7a\x00", b"\x7a\x02\x18\x02"  # 15


def encoded(spans: Iterable[LeanSpan]) -> bytes:
    """One request that holds all of them, by scope; less those that cannot be said, which is logged."""
    found: dict[SpanScope, list[bytes]] = {}
    for span in spans:
        said = found.get(span.scope)
        if said is None:
            said = found[span.scope] = []
        try:
            data = _span(span)
            said.append(b"\x12" + _varint(len(data)))  # 2
            said.append(data)
        except Exception:  # noqa: BLE001  # the others are to be sent, whatever it is
            _LOG.exception("a span cannot be said: %s", span.name)
    return b"".join(_field(1, _of_scope(scope, said)) for scope, said in found.items())


def _of_scope(scope: SpanScope, spans: Sequence[bytes]) -> bytes:
    resource, named = scope.resource, scope.scope
    name = _text(1, named.name) + _text(2, named.version) + _attributes(3, named.attributes)
    of_scope = b"".join([_field(1, name), *spans, _text(3, named.schema_url)])
    of_process = _field(1, _attributes(1, resource.attributes))
    return of_process + _field(2, of_scope) + _text(3, resource.schema_url)


def _span(span: LeanSpan) -> bytes:
    span.complete()
    parent = span.parent_id
    return b"".join(
        (
            b"\x0a\x10",  # 1
            span.trace_id.to_bytes(16),
            b"\x12\x08",  # 2
            span.span_id.to_bytes(8),
            _state(span.trace_state) if span.trace_state else b"",
            b"\x22\x08" + parent.to_bytes(8) if parent else b"",  # 4
            _named(span.name, span.kind),
            pack("<BQBQ", 0x39, span.start_ns, 0x41, span.end_ns or 0),  # 7, 8
            _form(span.numbers[0]).filled(span.numbers[1]) if span.numbers[0] else b"",
            _attributes(9, span.attributes),
            *[_field(11, _event(event)) for event in span.events],
            _number(12, getattr(span.events, "dropped", 0)),
            *[_link(link) for link in span.links],
            _number(14, span.dropped_links),
            _ERROR if span.failed else _UNSET,
            b"\x85\x01",  # 16
            _REMOTE if span.has_remote_parent else _LOCAL,
        )
    )


class _Form:
    """Numbers of the same names: to fill a message anew costs a third of writing each of them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._message = Span(attributes=[KeyValue(key=name) for name in names])
        self._values = [attribute.value for attribute in self._message.attributes]
        self._filling = Lock()

    def filled(self, numbers: Sequence[int]) -> bytes:
        """These attributes of a span. Raises ValueError for a number that OTLP cannot hold."""
        with self._filling:
            for value, number in zip(self._values, numbers, strict=True):
                value.int_value = number
            return self._message.SerializeToString()


@lru_cache(maxsize=64)
def _form(names: tuple[str, ...]) -> _Form:
    return _Form(names)


@lru_cache(maxsize=256)
def _named(name: str, kind: SpanKind) -> bytes:
    return _text(5, name) + _number(6, kind.value + 1)


def _event(event: Event) -> bytes:
    return b"\x09" + pack("<Q", event.timestamp) + _text(2, event.name) + _attributes(3, event.attributes)


def _link(link: Linked) -> bytes:
    to, attributes = link
    if isinstance(to, bytes):
        trace_id, span_id, flags = to[:16], to[16:], _REMOTE
    else:
        trace_id, span_id = to.trace_id.to_bytes(16), to.span_id.to_bytes(8)
        flags = _REMOTE if to.is_remote else _LOCAL
    told = _attributes(4, attributes)
    return b"\x6a" + _sized(b"\x0a\x10%b\x12\x08%b%b\x35%b" % (trace_id, span_id, told, flags))  # 13; 1, 2, 6


def _state(state: TraceState) -> bytes:
    return _text(3, ",".join(f"{key}={value}" for key, value in state.items()))


def _attributes(number: int, attributes: Mapping[str, AnyValue] | None) -> bytes:
    """Without numbers that OTLP cannot hold."""
    if not attributes:
        return b""
    said = []
    for key, value in attributes.items():
        if type(value) is int:
            if 0 <= value < _OFTEN:
                said.append(_common(number, key, value))
            elif _LEAST_INT <= value <= _MOST_INT:
                digits = _varint(value & (2**64 - 1))
                said.append(_before(number, key, len(digits)) + digits)
        elif type(value) is str and len(value) <= _SHORT:
            said.append(_common(number, key, value))
        else:
            said.append(_attribute(number, key, value))
    return b"".join(said)


@lru_cache(maxsize=4096)
def _common(number: int, key: str, value: int | str) -> bytes:
    """What comes again and again: names, addresses, small numbers."""
    return _attribute(number, key, value)


@lru_cache(maxsize=1024)
def _before(number: int, key: str, digits: int) -> bytes:
    """What stands before the digits of a number, of which there are so many."""
    value = _field(2, b"\x18" + bytes(digits))
    return _field(number, _key(key) + value)[:-digits]


def _attribute(number: int, key: str, value: AnyValue) -> bytes:
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
    return _SINGLE[number << 3 | 2] + _sized(data)


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data


def _text(number: int, text: str | None) -> bytes:
    return _field(number, text.encode()) if text else b""


def _number(number: int, value: int) -> bytes:
    return _SINGLE[number << 3] + _varint(value) if value else b""


def _varint(value: int) -> bytes:
    if value < 0x80:
        return _SINGLE[value]
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if value < 0x20_0000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    low = bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14 & 0x7F | 0x80))
    return low + _varint(value >> 21)

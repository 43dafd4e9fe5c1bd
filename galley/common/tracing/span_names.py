"""Packed ids of a span in messages: trace id (16 bytes) and span id (8 bytes)."""

from __future__ import annotations

from opentelemetry import trace

_TRACE_ID_BYTES, _SPAN_ID_BYTES = 16, 8
_NO_TRACE, _NO_SPAN = bytes(_TRACE_ID_BYTES), bytes(_SPAN_ID_BYTES)
_SAMPLED = trace.TraceFlags(trace.TraceFlags.SAMPLED)


def packed(trace_id: int, span_id: int) -> bytes:
    """Pack the ids of a span."""
    return trace_id.to_bytes(_TRACE_ID_BYTES) + span_id.to_bytes(_SPAN_ID_BYTES)


def names_a_span(name: bytes) -> bool:
    """Return True if the bytes are valid packed ids."""
    if len(name) != _TRACE_ID_BYTES + _SPAN_ID_BYTES:
        return False
    return name[:_TRACE_ID_BYTES] != _NO_TRACE and name[_TRACE_ID_BYTES:] != _NO_SPAN


def unpacked(name: bytes) -> trace.SpanContext:
    """Unpack the context of a remote, sampled span; an invalid context for other bytes."""
    if not names_a_span(name):
        return trace.INVALID_SPAN_CONTEXT
    trace_id, span_id = (int.from_bytes(part) for part in (name[:_TRACE_ID_BYTES], name[_TRACE_ID_BYTES:]))
    return trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=_SAMPLED)

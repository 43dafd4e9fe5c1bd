"""What a stored session keeps of the request that began it: what that asked for, and its trace.

A stream that is resumed is what its session was begun as, to traces and to metrics.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace import SpanContext

from galley.common.tracing.telemetry import context_from
from galley.core.names import CHAT, TEXT_COMPLETION
from galley.pb.galley.v1 import galley_pb2 as pb

OPERATION_FIELD = "operation"
"""As the GenAI conventions name it, unless it is a text completion: a session is small."""
TRACE_FIELD = "trace"
"""The traceparent, if it is traced."""


def operation_of(request: pb.GenerateRequest | pb.ResumeRequest) -> str:
    """As far as the request says it: what a resumed stream is, only its session knows."""
    is_chat = isinstance(request, pb.GenerateRequest) and request.HasField("messages")
    return CHAT if is_chat else TEXT_COMPLETION


def operation_fields(operation: str) -> dict[str, bytes]:
    """What is kept of it."""
    return {} if operation == TEXT_COMPLETION else {OPERATION_FIELD: operation.encode()}


def stored_operation(fields: Mapping[str, bytes]) -> str:
    """What the session of these fields was begun as."""
    return CHAT if fields.get(OPERATION_FIELD) == CHAT.encode() else TEXT_COMPLETION


def trace_fields(traceparent: str) -> dict[str, bytes]:
    """What is kept of its span."""
    return {TRACE_FIELD: traceparent.encode()}


def stored_trace(fields: Mapping[str, bytes]) -> SpanContext:
    """The span of the request that began the session of these fields; an invalid one if it was not traced."""
    named = fields.get(TRACE_FIELD, b"").decode(errors="replace")
    return trace.get_current_span(context_from(named)).get_span_context()

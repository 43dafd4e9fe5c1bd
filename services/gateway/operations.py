"""What a call asks for, as the GenAI conventions name it: its trace and its metrics say the same.

A stream that is resumed is what its session was begun as, so that is kept with the session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.common.pb.galley.v1 import galley_pb2 as pb
from services.core.trace_names import CHAT, TEXT_COMPLETION

if TYPE_CHECKING:
    from collections.abc import Mapping

OPERATION_FIELD = "operation"
"""Of a stored session, unless it is a text completion: a session is small."""


def operation_of(request: pb.GenerateRequest | pb.ResumeRequest) -> str:
    """As far as the request says it: what a resumed stream is, only its session knows."""
    is_chat = isinstance(request, pb.GenerateRequest) and request.HasField("messages")
    return CHAT if is_chat else TEXT_COMPLETION


def operation_fields(operation: str) -> dict[str, bytes]:
    """What a session that begins now keeps of it."""
    return {} if operation == TEXT_COMPLETION else {OPERATION_FIELD: operation.encode()}


def stored_operation(fields: Mapping[str, bytes]) -> str:
    """What the session of these fields was begun as."""
    return CHAT if fields.get(OPERATION_FIELD) == CHAT.encode() else TEXT_COMPLETION

"""Translate requests for responses into those of the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from galley.core.errors import InvalidField
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.http.api.requests import common_request
from services.gateway.http.responses.record import Record, Turn
from services.gateway.http.responses.schemas import InputItem, ResponseRequest

_ROLES = {"developer": "system"}
_TEXTS = ("input_text", "output_text", "text")
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


def wire_request(
    body: ResponseRequest, former: Sequence[Turn], key: str
) -> tuple[pb.GenerateRequest, Record]:
    """Return the request that continues the turns `former`, and what is stored of it. Raise InvalidField."""
    request = common_request(body, key, body.max_output_tokens)
    turns = [*former, *_turns(body.input)]
    system = [Turn("system", body.instructions)] if body.instructions else []
    request.messages.CopyFrom(
        pb.ChatMessages(messages=[pb.ChatMessage(role=one.role, content=one.text) for one in system + turns])
    )
    if body.wants_logprobs:
        request.logprobs = body.top_logprobs or 0
    is_kept = body.store is not False
    return request, Record(_parameters(body), turns if is_kept else None)


@contextmanager
def named_as_here() -> Iterator[None]:
    """Let errors of the wire's fields name the parameters of the Responses API."""
    try:
        yield
    except InvalidField as error:
        name, dot, rest = error.field.partition(".")
        if name in _NAMES:
            rest = "" if name == "messages" else dot + rest
            raise InvalidField(_NAMES[name] + rest, error.problem) from error
        raise


def _turns(given: str | Sequence[InputItem]) -> list[Turn]:
    if isinstance(given, str):
        return [Turn("user", given)]
    return [_turn(item, f"input[{index}]") for index, item in enumerate(given)]


def _turn(item: InputItem, name: str) -> Turn:
    if item.type not in {None, "message"}:
        raise InvalidField(f"{name}.type", f"must be 'message', got {str(item.type)[:32]!r}")
    if item.role is None or item.content is None:
        raise InvalidField(name, "must have a role and a content")
    role = _ROLES.get(item.role, item.role)
    if isinstance(item.content, str):
        return Turn(role, item.content)
    for at, part in enumerate(item.content):
        if part.type not in _TEXTS or part.text is None:
            problem = f"must be of type input_text or output_text with a text, got type {part.type[:32]!r}"
            raise InvalidField(f"{name}.content[{at}]", problem)
    return Turn(role, "".join(part.text or "" for part in item.content))


def _parameters(body: ResponseRequest) -> dict[str, Any]:
    """Return what the response repeats of its request."""
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "previous_response_id": body.previous_response_id,
        "service_tier": body.service_tier or "default",
        "store": body.store is not False,
        "top_logprobs": body.top_logprobs or 0,
        "user": body.user,
    }

"""Translate requests for responses into those of the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from galley.common.models.tokenizer import Tokenizer
from galley.core.errors import InvalidField
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.http.api.requests import ROLES, common_request
from services.gateway.http.parameters.structured import renamed, set_text_format
from services.gateway.http.parameters.tools import NamedFunction
from services.gateway.http.responses.record import Call, Record, Turn
from services.gateway.http.responses.schemas import InputItem, InputPart, ResponseRequest
from services.gateway.http.tools.requests import tool_use

_TEXTS = ("input_text", "output_text", "text")
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


def wire_request(
    body: ResponseRequest, former: Sequence[Turn], key: str, tokenizer: Tokenizer
) -> tuple[pb.GenerateRequest, Record, str]:
    """Return the request that continues the turns `former`, and what is stored of it. Raise InvalidField.

    Return, too, the parameter that gives the language of the answer, empty if none does.
    """
    request = common_request(body, key, body.max_output_tokens)
    turns = [*former, *_turns(body.input)]
    system = [Turn("system", body.instructions)] if body.instructions else []
    request.messages.messages.extend(map(_message, system + turns))
    if body.wants_logprobs:
        request.logprobs = body.top_logprobs or 0
    language = set_text_format(request, body.text.format if body.text is not None else None)
    tools = tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls, place="")
    if tools is not None:
        language = tools.set(request, tokenizer, language)
    is_kept = body.store is not False
    return request, Record(_parameters(body), turns if is_kept else None), language


@contextmanager
def named_as_here(language: str) -> Iterator[None]:
    """Let errors of the wire's fields name the parameters of the Responses API."""
    try:
        yield
    except InvalidField as fault:
        error = renamed(fault, language)
        name, dot, rest = error.field.partition(".")
        if name in _NAMES and not rest.startswith("tools"):  # `tools` are named as in chats
            rest = "" if name == "messages" else dot + rest
            raise InvalidField(_NAMES[name] + rest, error.problem) from fault
        raise error from fault


def _message(turn: Turn) -> pb.ChatMessage:
    calls = [pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in turn.calls]
    return pb.ChatMessage(role=turn.role, content=turn.text, tool_calls=calls, tool_call_id=turn.call_id)


def _turns(given: str | Sequence[InputItem]) -> list[Turn]:
    if isinstance(given, str):
        return [Turn("user", given)]
    turns: list[Turn] = []
    for index, item in enumerate(given):
        _add(turns, item, f"input[{index}]")
    return turns


def _add(turns: list[Turn], item: InputItem, name: str) -> None:
    """Add an item; calls are part of the turn before them, if that is the assistant's."""
    match item.type:
        case None | "message":
            if item.role is None or item.content is None:
                raise InvalidField(name, "must have a role and a content")
            turns.append(Turn(ROLES.get(item.role, item.role), _text(item.content, f"{name}.content")))
        case "function_call":
            if not item.call_id or not item.name or item.arguments is None:
                raise InvalidField(name, "must have call_id, name and arguments")
            call = Call(item.call_id, item.name, item.arguments)
            last = turns.pop() if turns and turns[-1].role == "assistant" else Turn("assistant", "")
            turns.append(last._replace(calls=[*last.calls, call]))
        case "function_call_output":
            if not item.call_id or item.output is None:
                raise InvalidField(name, "must have call_id and output")
            turns.append(Turn("tool", _text(item.output, f"{name}.output"), call_id=item.call_id))
        case "reasoning":
            pass  # of an answer that is sent back; templates leave it out
        case kind:
            problem = "must be 'message', 'function_call', 'function_call_output' or 'reasoning'"
            raise InvalidField(f"{name}.type", f"{problem}, got {kind[:32]!r}")


def _text(content: str | Sequence[InputPart], name: str) -> str:
    if isinstance(content, str):
        return content
    for at, part in enumerate(content):
        if part.type not in _TEXTS or part.text is None:
            problem = f"must be of type input_text or output_text with a text, got type {part.type[:32]!r}"
            raise InvalidField(f"{name}[{at}]", problem)
    return "".join(part.text or "" for part in content)


def _parameters(body: ResponseRequest) -> dict[str, Any]:
    """Return what the response repeats of its request."""
    choice = body.tool_choice
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "previous_response_id": body.previous_response_id,
        "service_tier": body.service_tier or "default",
        "store": body.store is not False,
        "text": {"format": _text_format(body)},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
        "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
        "top_logprobs": body.top_logprobs or 0,
        "user": body.user,
    }


def _text_format(body: ResponseRequest) -> dict[str, Any]:
    form = body.text.format if body.text is not None else None
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_unset=True)

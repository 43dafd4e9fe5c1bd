"""Translate requests for responses into those of the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from galley.common.models.tokenizer import Tokenizer
from galley.core.errors import InvalidField
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.http.api.requests import ROLES, common_request
from services.gateway.http.parameters.parts import Open
from services.gateway.http.parameters.structured import renamed, set_text_format
from services.gateway.http.parameters.tools import NamedFunction
from services.gateway.http.responses.record import Call, Record, Turn
from services.gateway.http.responses.schemas import InputItem, InputPart, ResponseRequest
from services.gateway.http.tools.requests import tool_use
from services.gateway.http.transport.encoding import json_text, json_texts

_TEXTS = ("input_text", "output_text", "text")
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


class Translation:
    """The request of a response that continues the turns `former`, and the record of it.

    `language` is the parameter that gives the language of the answer, empty if none does. Raise InvalidField.
    """

    def __init__(self, body: ResponseRequest, former: Sequence[Turn], key: str) -> None:
        self.request = common_request(body, key, body.max_output_tokens)
        self.record = Record()
        self.language = ""
        self._body = body
        self._turns = [*former, *_turns(body.input)]
        self._tools = tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls, place="")
        system = [Turn("system", body.instructions)] if body.instructions else []
        self.request.messages.messages.extend(map(_message, system + self._turns))
        if body.wants_logprobs:
            self.request.logprobs = body.top_logprobs or 0

    @property
    def has_tools(self) -> bool:
        return self._tools is not None

    async def complete(self, tokenizer: Tokenizer, turn: asyncio.Lock) -> dict[str, bytes]:
        """Set language and tools, and write the record, in slices within `turn`; return its stored fields.

        Raise InvalidField.
        """
        body = self._body
        form = body.text.format if body.text is not None else None
        self.language = await set_text_format(self.request, form, turn)
        if self._tools is not None:
            self.language = await self._tools.set(self.request, tokenizer, self.language, turn)
        self.record.parameters = await _parameters(body, turn)
        if body.store is not False:
            turns = await json_text([one.stored for one in self._turns], turn)
            self.record.turns = turns.encode()
        return self.record.stored

    def renamed(self, error: InvalidField) -> InvalidField:
        """Return an error about the language of the answer as one that names the parameter that gave it."""
        located = error if self._tools is None else self._tools.located(error, self.language)
        return renamed(located, self.language)


@contextmanager
def named_as_here(translation: Translation) -> Iterator[None]:
    """Let errors of the wire's fields name the parameters of the Responses API."""
    try:
        yield
    except InvalidField as fault:
        error = translation.renamed(fault)
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


async def _parameters(body: ResponseRequest, turn: asyncio.Lock) -> bytes:
    """Return what the response repeats of its request, as the members of a JSON object."""
    choice = body.tool_choice
    before = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "previous_response_id": body.previous_response_id,
        "service_tier": body.service_tier or "default",
        "store": body.store is not False,
        "text": {"format": _text_format(body)},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
    }
    after = {
        "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
        "top_logprobs": body.top_logprobs or 0,
        "user": body.user,
    }
    values = [before, after, *map(_given, body.tools or ())]
    first, last, *tools = await json_texts(values, turn)
    return f'{first[1:-1]},"tools":[{",".join(tools)}],{last[1:-1]}'.encode()


def _text_format(body: ResponseRequest) -> dict[str, Any]:
    form = body.text.format if body.text is not None else None
    return {"type": "text"} if form is None else _given(form)


def _given(part: Open) -> dict[str, Any]:
    """Return what was given of a part, as `model_dump` does, but without copies of large values."""
    fields, given = type(part).model_fields, part.model_fields_set
    known = {info.alias or name: getattr(part, name) for name, info in fields.items() if name in given}
    return {**known, **(part.model_extra or {})}

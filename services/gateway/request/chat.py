"""Chats as a model's template takes them: turns with calls of tools, and the tools themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from galley.core.errors import InvalidField, check_length
from galley.pb.galley.v1 import galley_pb2 as pb

MAX_TOOLS = 128
MAX_ROLE_BYTES = 64
MAX_VALUES = 32_768
_MOST_DEPTH = 64


def chat_messages(messages: Sequence[pb.ChatMessage], most: int) -> list[dict[str, Any]]:
    """Return the messages of a chat. Raise InvalidField."""
    field = "messages.messages"
    if not 1 <= len(messages) <= most:
        raise InvalidField(field, f"must have 1 to {most} entries, got {len(messages)}")
    return [_message(message, f"{field}[{index}]") for index, message in enumerate(messages)]


def chat_tools(tools: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tools of a chat. Raise InvalidField."""
    field = "messages.tools"
    check_length(field, tools, MAX_TOOLS)
    return [_json_object(tool, f"{field}[{index}]") for index, tool in enumerate(tools)]


def chat_bytes(chat: pb.ChatMessages) -> int:
    """Return the size of what a chat brings into its prompt."""
    size = sum(len(tool.encode()) for tool in chat.tools)
    for message in chat.messages:
        texts = [message.content, message.name, message.reasoning_content, message.tool_call_id]
        for call in message.tool_calls:
            texts += [call.id, call.name, call.arguments]
        size += sum(len(text.encode()) for text in texts)
    return size


def check_values(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidField if tools and arguments of calls have too many values together.

    Each is read one by one, at a price beyond that of its bytes.
    """
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    count, rest = 0, [*tools, *(call["function"]["arguments"] for call in calls)]
    while rest:
        value = rest.pop()
        count += 1
        if isinstance(value, dict):
            count += len(value)
            rest += value.values()
        elif isinstance(value, list):
            rest += value
        if count > MAX_VALUES:
            problem = f"must have at most {MAX_VALUES} values and names in all tools and arguments of calls"
            raise InvalidField("messages", problem)


def _message(message: pb.ChatMessage, field: str) -> dict[str, Any]:
    """Return a message; a field that is empty is absent, as templates test for it."""
    if not message.role:
        raise InvalidField(f"{field}.role", "must not be empty")
    check_length(f"{field}.role", message.role.encode(), MAX_ROLE_BYTES, "bytes")
    fields = {"role": message.role, "content": message.content}
    more: dict[str, Any] = {
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [
            _call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(message.tool_calls)
        ],
    }
    return {**fields, **{name: value for name, value in more.items() if value}}


def _call(call: pb.ToolCall, field: str) -> dict[str, Any]:
    if not call.name:
        raise InvalidField(f"{field}.name", "must not be empty")
    function = {"name": call.name, "arguments": _arguments(call.arguments or "{}")}
    return {"id": call.id, "type": "function", "function": function}


def _arguments(text: str) -> dict[str, Any] | str:
    """Return the arguments of a call: the text itself if a model wrote no JSON object, or was cut off."""
    try:
        return _json_object(text, "arguments")
    except InvalidField:
        return text


def _json_object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidField(field, "must be a JSON object")
    if _is_deeper(value, _MOST_DEPTH):
        raise InvalidField(field, f"must be nested at most {_MOST_DEPTH} deep")
    return value


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            part
            for one in level
            if isinstance(one, (dict, list))
            for part in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return any(isinstance(one, (dict, list)) for one in level)

"""Translate tools into the prompt's part of a request, and into the language of an answer that must call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from galley.common.models.tokenizer import Tokenizer
from galley.core.errors import InvalidField
from galley.core.grammar.limits import DEFAULT_LIMITS, InvalidGrammar
from galley.core.grammar.pieces import read_json
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.http.parameters.tools import Function, NamedFunction
from services.gateway.http.tools.formats import Form, ToolFormat, one_of, structural_tag, tool_format
from services.gateway.http.transport.encoding import json_text, json_texts

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, those that the model may call, and whether it must call one.

    The arguments of `strict` tools always obey their schema.
    """

    tools: Sequence[dict[str, Any]]
    callable_tools: Sequence[dict[str, Any]]
    strict: frozenset[str]
    is_required: bool
    parallel: bool

    async def set(
        self, request: pb.GenerateRequest, tokenizer: Tokenizer, language: str, turn: asyncio.Lock
    ) -> str:
        """Set the tools of a request, and the language of its answer, in slices within `turn`.

        `language` is the parameter that gave the language of an answer without calls; return the one that
        gives it now. Raise InvalidField.
        """
        await self.add_to(request, turn)
        name = f"tools or {language}" if language and not self.is_required else "tools"
        if self.is_required or language:
            await _check_size(self.callable_tools, name, turn)
        form = self._form(request.structured_output, tool_format(tokenizer), language)
        if form is None:
            return ""
        await asyncio.sleep(0)
        request.structured_output.structural_tag = await json_text(structural_tag(form), turn)
        return name

    async def add_to(self, request: pb.GenerateRequest, turn: asyncio.Lock) -> None:
        """Add the tools that the chat template tells the model of, in slices within `turn`."""
        request.messages.tools.extend(await json_texts(self.tools, turn))

    def _form(self, output: pb.StructuredOutput, written: ToolFormat, language: str) -> Form | None:
        """Return the form of the answer; None if it may be any text."""
        if self.is_required or language:
            calls = written.calls(self.callable_tools, parallel=self.parallel)
            return calls if self.is_required else one_of(calls, _form_of(output, language))
        if not self.strict:
            return None
        tools = [tool if tool["function"]["name"] in self.strict else _unbound(tool) for tool in self.tools]
        return written.optional_calls(tools, parallel=self.parallel)


def tool_use(
    functions: Sequence[Function] | None,
    choice: Literal["auto", "none", "required"] | NamedFunction | None,
    *,
    parallel: bool | None,
    place: str,
) -> ToolUse | None:
    """Return the tools that the model may call; None if there are none. Raise InvalidField.

    `place` is where a tool and a choice have their function, such as `.function`.
    """
    if not functions:
        if choice not in (None, "none", "auto"):
            raise InvalidField("tool_choice", "must be absent without tools")
        return None
    if choice == "none":
        return None
    tools = {}
    for index, function in enumerate(functions):
        if function.name in tools:
            raise InvalidField(f"tools[{index}]{place}.name", "must be unique")
        tools[function.name] = _described(function)
    may_call = list(tools.values())
    if isinstance(choice, NamedFunction):
        if choice.name not in tools:
            raise InvalidField(f"tool_choice{place}.name", f"must be the name of a tool, got {choice.name!r}")
        may_call = [tools[choice.name]]
    return ToolUse(
        list(tools.values()),
        may_call,
        frozenset(function.name for function in functions if function.strict),
        is_required=choice not in (None, "auto"),
        parallel=parallel is not False and not isinstance(choice, NamedFunction),
    )


def _described(function: Function) -> dict[str, Any]:
    """Return a tool as chat templates take it."""
    fields = {name: getattr(function, name) for name in ("name", "description", "parameters")}
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": given}


def _unbound(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool that takes any arguments."""
    return {"function": {**tool["function"], "parameters": _ANY_OBJECT}}


async def _check_size(tools: Sequence[Mapping[str, Any]], name: str, turn: asyncio.Lock) -> None:
    """Raise InvalidField for schemas that are too large for a grammar: to make its form takes long."""
    schemas = await json_texts([tool["function"].get("parameters") for tool in tools], turn)
    _check_bytes(name, sum(len(schema.encode()) for schema in schemas))


def _check_bytes(name: str, size: int) -> None:
    most = DEFAULT_LIMITS.most_text_bytes
    if size > most:
        raise InvalidField(name, f"must be at most {most} bytes, got {size}")


def _form_of(output: pb.StructuredOutput, name: str) -> Form:
    """Return the language of an answer as a form that may stand beside that of calls."""
    match output.WhichOneof("kind"):
        case "json_schema":
            _check_bytes(name, len(output.json_schema.encode()))
            try:
                schema = read_json("json_schema", output.json_schema, DEFAULT_LIMITS)
            except InvalidGrammar as error:
                raise InvalidField(name, error.problem) from None
            return {"type": "json_schema", "json_schema": schema}
        case "json_object":
            return {"type": "json_schema", "json_schema": _ANY_OBJECT}
        case "regex":
            return {"type": "regex", "pattern": output.regex}
    problem = "must be a JSON schema, a JSON object or a regex, or come with tool_choice 'none'"
    raise InvalidField(name, problem)

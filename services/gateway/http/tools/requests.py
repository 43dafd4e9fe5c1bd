"""Translate tools into the prompt's part of a request, and into the language of an answer that must call."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from galley.common.models.tokenizer import Tokenizer
from galley.core.errors import InvalidField
from galley.core.grammar.limits import DEFAULT_LIMITS, FIELD, InvalidGrammar
from galley.core.grammar.pieces import read_json
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.http.parameters.tools import Function, NamedFunction
from services.gateway.http.tools.formats import (
    Form,
    ToolFormat,
    one_of,
    refused_tool,
    structural_tag,
    tool_format,
)
from services.gateway.http.transport.encoding import json_text, json_texts

_ANY_OBJECT = {"type": "object"}
_TAG = f"{FIELD}.structural_tag"
_ANSWER = re.compile(r"format\.elements\[1\]\.(?:json_schema|pattern) ")
"""What an error begins with that is about the language of an answer beside calls."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, those that the model may call, and whether it must call one.

    The arguments of `strict` tools always obey their schema. `place` is that of `tool_use`.
    """

    tools: Sequence[dict[str, Any]]
    callable_tools: Sequence[dict[str, Any]]
    strict: frozenset[str]
    is_required: bool
    parallel: bool
    place: str

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
            await _check_size(self.callable_tools, turn)
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
            self._check_types(self.callable_tools)
            calls = written.calls(self.callable_tools, parallel=self.parallel)
            return calls if self.is_required else one_of(calls, _form_of(output, language))
        if not self.strict:
            return None
        tools = [tool if tool["function"]["name"] in self.strict else _unbound(tool) for tool in self.tools]
        form = written.optional_calls(tools, parallel=self.parallel)
        if form is not None:
            self._check_types(tools)
        return form

    def _check_types(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Raise InvalidField for a tool whose schema allows no object."""
        for tool in tools:
            kinds = (tool["function"].get("parameters") or _ANY_OBJECT).get("type", "object")
            if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
                raise InvalidField(self._parameters_of(tool), f"must have type object, got {kinds!r:.80}")

    def located(self, error: InvalidField, language: str) -> InvalidField:
        """Return an error about the form of the answer as one about a tool or the language beside calls.

        `language` is what `set` returned. An error that tells neither stays as it is.
        """
        if error.field != _TAG:
            return error
        _, has_both, answer = language.partition(" or ")
        if has_both and (found := _ANSWER.match(error.problem)) is not None:
            return InvalidField(answer, error.problem[found.end() :])
        if (refused := refused_tool(error.problem)) is None:
            return error
        number, problem = refused
        return InvalidField(self._parameters_of(self.callable_tools[number]), problem)

    def _parameters_of(self, tool: Mapping[str, Any]) -> str:
        """Return the name of the parameter that is the schema of a tool's arguments."""
        name = tool["function"]["name"]
        index = next(at for at, one in enumerate(self.tools) if one["function"]["name"] == name)
        return f"tools[{index}]{self.place}.parameters"


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
        place=place,
    )


def _described(function: Function) -> dict[str, Any]:
    """Return a tool as chat templates take it."""
    fields = {name: getattr(function, name) for name in ("name", "description", "parameters")}
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": given}


def _unbound(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool that takes any arguments."""
    return {"function": {**tool["function"], "parameters": _ANY_OBJECT}}


async def _check_size(tools: Sequence[Mapping[str, Any]], turn: asyncio.Lock) -> None:
    """Raise InvalidField for schemas that are too large for a grammar: to make its form takes long."""
    schemas = await json_texts([tool["function"].get("parameters") for tool in tools], turn)
    _check_bytes("tools", sum(len(schema.encode()) for schema in schemas))


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

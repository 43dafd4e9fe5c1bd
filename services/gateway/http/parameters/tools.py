"""The parameters of tools and calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, StringConstraints

from services.gateway.http.parameters.parts import Few, Open

Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class _OfFunctions(Open):
    type: Literal["function"]


class Function(Open):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of the arguments.")
    strict: bool | None = Field(
        None,
        description="The schema holds with `tool_choice` `auto`, too, unless the model writes calls in the "
        "form of Llama 3.",
    )


class Tool(_OfFunctions):
    function: Function


class NamedFunction(Open):
    name: Name


class NamedTool(_OfFunctions):
    function: NamedFunction


class FlatTool(Function, _OfFunctions):
    """A tool as the Responses API has it. `type` is checked first, as the last base has it."""


class FlatNamedTool(NamedFunction, _OfFunctions):
    pass


Mode: TypeAlias = Literal["auto", "none", "required"]
ToolChoice: TypeAlias = Mode | NamedTool
FlatToolChoice: TypeAlias = Mode | FlatNamedTool
Tools: TypeAlias = Annotated[list[Tool], Field(fail_fast=True, max_length=128)]
FlatTools: TypeAlias = Annotated[list[FlatTool], Field(fail_fast=True, max_length=128)]


class CalledFunction(Open):
    name: str = Field(description="As the model wrote it, which may be the name of no tool.")
    arguments: str = Field(description="A JSON object, as text; or other text, as a model may write.")


class ToolCall(Open):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


ToolCalls: TypeAlias = Few[ToolCall]

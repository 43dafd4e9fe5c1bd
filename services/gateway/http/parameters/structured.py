"""Parameters that say which language an answer belongs to, or what it probably says."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

from pydantic import Field

from galley.core.errors import InvalidField, Unimplemented
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.http.parameters.parts import ContentPart, Few, Open, text_of
from services.gateway.http.transport.encoding import json_text

JsonSchema = dict[str, Any] | bool
_FIELD = "structured_output"
_BESIDE = f"with {_FIELD},"
_SPACED = json.JSONEncoder()
_WITHOUT_EFFECT = frozenset({"disable_fallback", "disable_any_whitespace"})


class JsonSchemaFormat(Open):
    name: str | None = Field(None, description="Accepted, without effect.")
    description: str | None = Field(None, description="Accepted, without effect.")
    json_schema: JsonSchema = Field(alias="schema")
    strict: bool | None = Field(None, description="Accepted, without effect: the schema always holds.")


class ResponseFormat(Open):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = Field(None, description="With type `json_schema`.")


class TextFormat(Open):
    """The language of a text, as the Responses API has it."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description="Accepted, without effect.")
    description: str | None = Field(None, description="Accepted, without effect.")
    json_schema: JsonSchema | None = Field(None, alias="schema", description="With type `json_schema`.")
    strict: bool | None = Field(None, description="Accepted, without effect: the schema always holds.")


class TextOptions(Open):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class StructuredOutputs(Open):
    """One of these, as vLLM has them."""

    json_schema: JsonSchema | str | None = Field(None, alias="json", description="JSON Schema.")
    regex: str | None = Field(None, description="Regular expression for the whole answer.")
    choice: Few[str] | None = Field(None, description="The answer is one of these texts.")
    grammar: str | None = Field(None, description="Grammar in Lark or GBNF.")
    json_object: bool | None = Field(None, description="The answer is a JSON object.")
    structural_tag: str | None = Field(None, description="Structural tag, as JSON.")


class Prediction(Open):
    type: Literal["content"] = "content"
    content: str | Few[ContentPart]


def set_prediction(request: pb.GenerateRequest, prediction: Prediction | None) -> None:
    if prediction is not None:
        request.prediction.text = text_of(prediction.content, "prediction.content")


async def set_language(
    request: pb.GenerateRequest,
    form: ResponseFormat | None,
    outputs: StructuredOutputs | None,
    turn: asyncio.Lock,
) -> str:
    """Set the language of the answer; return the parameter that gave it, empty if none did.

    A large schema is encoded in slices within `turn`.
    """
    if form is not None and form.type != "text":
        if outputs is not None:
            raise InvalidField("structured_outputs", "must be absent with response_format")
        return await _set_format(request.structured_output, form, turn)
    return "" if outputs is None else await _set_outputs(request.structured_output, outputs, turn)


async def set_text_format(request: pb.GenerateRequest, form: TextFormat | None, turn: asyncio.Lock) -> str:
    """Set the language of a response as `set_language` does."""
    name, output = "text.format", request.structured_output
    match form and form.type:
        case "json_object":
            output.json_object.SetInParent()
            return name
        case "json_schema" if form is not None:
            if form.json_schema is None:
                raise InvalidField(f"{name}.schema", "must be given with type json_schema")
            output.json_schema = await json_text(form.json_schema, turn)
            return f"{name}.schema"
    return ""


def renamed(error: InvalidField, name: str) -> InvalidField:
    """Return an error about the language of an answer as one that names the parameter that gave it."""
    if name and error.field.split(".")[0] == _FIELD:
        return InvalidField(name, error.problem)
    if name and _BESIDE in error.problem:
        return InvalidField(error.field, error.problem.replace(_BESIDE, f"with {name},", 1))
    return error


async def _set_format(output: pb.StructuredOutput, form: ResponseFormat, turn: asyncio.Lock) -> str:
    name = "response_format"
    match form.type:
        case "json_schema":
            if form.json_schema is None:
                raise InvalidField(f"{name}.json_schema", "must be given with type json_schema")
            output.json_schema = await json_text(form.json_schema.json_schema, turn)
            return f"{name}.json_schema.schema"
        case "structural_tag":
            tag = {"type": form.type, **(form.model_extra or {})}
            output.structural_tag = await json_text(tag, turn, _SPACED)
        case _:
            output.json_object.SetInParent()
    return name


async def _set_outputs(output: pb.StructuredOutput, outputs: StructuredOutputs, turn: asyncio.Lock) -> str:
    name = "structured_outputs"
    for option, value in (outputs.model_extra or {}).items():
        if option not in _WITHOUT_EFFECT and value is not None and value is not False:
            raise Unimplemented(f"{name}.{option[:32]}")
    given = [field for field in type(outputs).model_fields if getattr(outputs, field) not in (None, False)]
    if len(given) != 1:
        kinds = "json, regex, choice, grammar, json_object, structural_tag"
        raise InvalidField(name, f"must have one of {kinds}, got {len(given)}")
    match given[0]:
        case "json_schema":
            schema = outputs.json_schema
            output.json_schema = schema if isinstance(schema, str) else await json_text(schema, turn)
            return f"{name}.json"
        case "choice":
            output.choice.choices.extend(outputs.choice or ())
        case "json_object":
            output.json_object.SetInParent()
        case field:
            setattr(output, field, getattr(outputs, field))
    return f"{name}.{given[0]}"

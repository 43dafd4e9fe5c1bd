"""The parameters of OpenAI's Responses API that are served: text in, text out."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from services.gateway.http.api.schemas import Parameters
from services.gateway.http.parameters.parts import Few
from services.gateway.http.parameters.structured import TextOptions
from services.gateway.http.parameters.tools import FlatToolChoice, FlatTools

_LOGPROBS = "message.output_text.logprobs"
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]],
    Field(fail_fast=True, max_length=16),
]


class _Item(BaseModel):
    """A part of the input. Answers may be sent back as they came: what else they hold is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class InputPart(_Item):
    type: str = Field(description="`input_text`, or `output_text` in an answer.")
    text: str | None = None


class InputItem(_Item):
    type: str | None = Field(
        None,
        description="`message`, also if unset; `function_call`, `function_call_output`; others are ignored.",
    )
    role: Literal["user", "assistant", "system", "developer"] | None = Field(
        None, description="`developer` is the same as `system`."
    )
    content: str | Few[InputPart] | None = Field(None, description="Text, or parts of text.")
    call_id: str | None = Field(None, description="Of a call, and of its output.")
    name: str | None = Field(None, description="Of a called function.")
    arguments: str | None = Field(None, description="Of a call: a JSON object, as text; or other text.")
    output: str | Few[InputPart] | None = Field(None, description="Of a call: text, or parts of text.")


class ResponseRequest(Parameters):
    input: str | Few[InputItem] = Field(description="Text of the user, or the messages of a conversation.")
    instructions: str | None = Field(
        None, description="A system message before the conversation; a later response does not inherit it."
    )
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 32, description="Most output tokens.")
    previous_response_id: str | None = Field(
        None, description="The stored response whose conversation `input` continues."
    )
    text: TextOptions | None = Field(None, description="The language of the answer.")
    tools: FlatTools | None = Field(None, description="Functions that the model may call.")
    tool_choice: FlatToolChoice | None = Field(None, description="Whether it may, or which of them it must.")
    parallel_tool_calls: bool | None = Field(
        None, description="False: at most one call an answer, where the form of calls is fixed."
    )
    store: bool | None = Field(
        None, description="Keep the response for `GET` and `previous_response_id`. Default: true."
    )
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Number of most likely tokens to return.")
    include: Few[Literal["message.output_text.logprobs"]] | None = None
    metadata: Metadata | None = Field(None, description="Returned with the response.")

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

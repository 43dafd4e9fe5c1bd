"""The parameters of OpenAI's Responses API that are served: text in, text out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from services.gateway.http.api.schemas import Few, Parameters

_LOGPROBS = "message.output_text.logprobs"


class _Item(BaseModel):
    """A part of the input. Answers may be sent back as they came: what else they hold is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)


class InputPart(_Item):
    type: str = Field(description="`input_text`, or `output_text` in an answer.")
    text: str | None = None


class InputItem(_Item):
    type: str | None = Field(None, description="Must be `message`, or unset.")
    role: Literal["user", "assistant", "system", "developer"] | None = Field(
        None, description="`developer` is the same as `system`."
    )
    content: str | Few[InputPart] | None = Field(None, description="Text, or parts of text.")


class ResponseRequest(Parameters):
    input: str | Few[InputItem] = Field(description="Text of the user, or the messages of a conversation.")
    instructions: str | None = Field(
        None, description="A system message before the conversation; a later response does not inherit it."
    )
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 32, description="Most output tokens.")
    previous_response_id: str | None = Field(
        None, description="The stored response whose conversation `input` continues."
    )
    store: bool | None = Field(
        None, description="Keep the response for `GET` and `previous_response_id`. Default: true."
    )
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Number of most likely tokens to return.")
    include: Few[Literal["message.output_text.logprobs"]] | None = None
    metadata: (
        dict[
            Annotated[str, StringConstraints(max_length=64)],
            Annotated[str, StringConstraints(max_length=512)],
        ]
        | None
    ) = Field(None, max_length=16, description="Returned with the response.")

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

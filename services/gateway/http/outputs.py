"""The bodies of responses, for the API's description. The handlers write them without these models."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    error: ErrorObject


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int] = {}
    completion_tokens_details: dict[str, int] = {}


class Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "abort"] | None
    stop_reason: str | int | None = Field(description="The stop string or token that ended the answer.")
    logprobs: dict[str, Any] | None
    token_ids: list[int] = Field([], description="With `return_token_ids`.")
    from_draft: list[bool] = Field([], description="With `return_token_ids`: which of them a draft proposed.")


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="A JSON object, as text; or other text, as a model may write.")


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = Field("", description="If the model reasoned.")
    tool_calls: list[ToolCall] = Field([], description="If the model called tools.")


class ChatChoice(Choice):
    message: ChatMessage


class TextChoice(Choice):
    text: str


class _Answers(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int
    usage: Usage
    metrics: dict[str, dict[str, Any]] = Field(description="Acceptance of the drafts.")


class ChatAnswers(_Answers):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextAnswers(_Answers):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class OutputMessage(BaseModel):
    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(BaseModel):
    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any]
    content: list[dict[str, str]]


class OutputCall(BaseModel):
    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: dict[str, int | None]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseBody(BaseModel):
    id: str
    token_ids: list[int] = Field([], description="With `return_token_ids`.")
    from_draft: list[bool] = Field([], description="With `return_token_ids`: which of them a draft proposed.")
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled"]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    previous_response_id: str | None
    store: bool
    temperature: float
    top_p: float
    usage: ResponseUsage | None
    metrics: dict[str, dict[str, Any]] | None
    seed: int
    stop_reason: str | int | None
    system_fingerprint: str


class InputItem(BaseModel):
    id: str
    type: Literal["message"]
    status: Literal["completed"]
    role: Literal["user", "assistant", "system"]
    content: list[dict[str, Any]]


class InputCallOutput(BaseModel):
    id: str
    type: Literal["function_call_output"]
    status: Literal["completed"]
    call_id: str
    output: str


class InputItems(BaseModel):
    object: Literal["list"]
    data: list[InputItem | OutputCall | InputCallOutput]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool


class ResponseDeleted(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class SessionChoice(BaseModel):
    index: int
    state: Literal["live", "finished"]
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: str | int | None
    completion_tokens: int
    accepted_draft_tokens: int
    accepted_prediction_tokens: int
    owner_epoch: int


class SessionState(BaseModel):
    id: str
    object: Literal["galley.session"]
    created: int
    model: str
    state: Literal["live", "finished"]
    seed: int
    choices: list[SessionChoice]
    usage: Usage


class SessionAborted(BaseModel):
    id: str
    object: Literal["galley.session"]
    aborted: Literal[True]


class AuditDifference(BaseModel):
    index: int = Field(description="Index among the output tokens.")
    logged_token_id: int
    computed_token_id: int
    logged_logprob: float | None = Field(description="In the model's own distribution, as computed now.")
    computed_logprob: float | None


class Audit(BaseModel):
    id: str
    object: Literal["galley.audit"]
    verdict: Literal["same", "differs", "damaged", "not_compared"]
    output_tokens: int
    compared: int
    differing: int
    differences: list[AuditDifference] = Field(description="The first 16.")
    system_fingerprint: str = Field(description="Build of the target that computed the tokens again.")
    deterministic: bool = Field(description="It promises the same tokens in any batch.")


class AuditedTokens(BaseModel):
    tokens: int
    differing: int


class Audits(BaseModel):
    object: Literal["galley.audits"]
    ratio: float = Field(description="Share of the sessions that this gateway audits; 0: none.")
    sessions: int
    damaged: int = Field(description="Sessions that do not agree with their hash.")
    deterministic: AuditedTokens = Field(description="Of builds for which each difference is an incident.")
    other: AuditedTokens


class ServedModel(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None = Field(description="Name of the served model, if this is a LoRA adapter.")
    max_model_len: int
    galley: dict[str, Any] = Field(description="GetModelInfo of the gRPC API.")


class ServedModels(BaseModel):
    object: Literal["list"]
    data: list[ServedModel]


class TokenIds(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    prompt: str


class Status(BaseModel):
    status: Literal["ok", "draining"]


class Version(BaseModel):
    version: str

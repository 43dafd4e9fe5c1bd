"""The parameters of OpenAI's API that are served, vLLM's further ones, and ours."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

from galley.core.errors import InvalidField, Unimplemented
from galley.core.sampling_params import MAX_LOGIT_BIAS_ENTRIES
from galley.core.trees import MAX_WIDTH
from services.gateway.http.parameters.parts import ContentPart, Few, Open
from services.gateway.http.parameters.structured import Prediction, ResponseFormat, StructuredOutputs
from services.gateway.http.parameters.tools import ToolCalls, ToolChoice, Tools
from services.gateway.http.transport.mismatch import printable_name

MAX_CHOICES = 8
_MAX_PROMPTS = 32
MAX_ANSWERS = _MAX_PROMPTS * MAX_CHOICES
_MAX_SHOWN = 16


def _unless_read(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return value if isinstance(value, array) else check(value)


Ids: TypeAlias = Annotated[list[int], Field(fail_fast=True, max_length=1 << 20), WrapValidator(_unless_read)]


def _bounds(**schema: Any) -> Any:
    """Describe bounds that the request is checked against later, with the others of its session."""
    return Field(None, json_schema_extra=schema)


class StreamOptions(Open):
    include_usage: bool | None = Field(None, description="Send a last chunk with the usage of the request.")


class SpeculationOptions(Open):
    mode: Literal["auto", "off", "fixed"] = Field("auto", description="`fixed`: k draft tokens a round.")
    k: int | None = Field(
        None, ge=0, lt=1 << 32, description="Draft tokens a round; with mode auto the most of them."
    )
    width: int | None = Field(
        None, ge=1, le=MAX_WIDTH, description="Most draft tokens for one position; above 1 they form a tree."
    )
    strategy: str = Field("", description="Strategy of the draft. Empty: the draft's default.")


class ChatTurn(Open):
    role: str = Field(description="Such as `system`, `user` or `assistant`.")
    content: str | Few[ContentPart] | None = Field(None, description="Text, or parts of type `text`.")
    name: str | None = Field(None, description="Passed to the model's chat template.")
    reasoning_content: str | None = Field(None, description="Passed to the model's chat template.")
    tool_calls: ToolCalls | None = Field(None, description="The calls of an assistant's turn.")
    tool_call_id: str | None = Field(None, description="The call that a turn of role `tool` answers.")


class Parameters(Open):
    """The parameters that all requests for answers have in common."""

    model: str | None = Field(None, description="Served model, or a LoRA adapter of it. Unset: the model.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events.")
    seed: int | None = Field(
        None, ge=0, lt=1 << 64, description="Seed of the sampling. Unset: drawn, and returned as `seed`."
    )
    temperature: float | None = _bounds(minimum=0)
    top_p: float | None = _bounds(exclusiveMinimum=0, maximum=1)
    top_k: int | None = Field(None, ge=-1, lt=1 << 32, description="-1 or 0: off.")
    min_p: float | None = _bounds(minimum=0, maximum=1)
    frequency_penalty: float | None = _bounds(minimum=-2, maximum=2)
    presence_penalty: float | None = _bounds(minimum=-2, maximum=2)
    repetition_penalty: float | None = _bounds(minimum=0.01, maximum=10)
    logit_bias: (
        Annotated[dict[str, float], Field(fail_fast=True, max_length=MAX_LOGIT_BIAS_ENTRIES)] | None
    ) = Field(None, description="Added to the logit of a token id.")
    min_tokens: int | None = Field(None, ge=0, lt=1 << 32)
    stop: str | Few[str] | None = Field(None, description="Strings that end the answer.")
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = Field(None, description="Do not stop at the model's own end tokens.")
    user: str | None = Field(None, max_length=256, description="Accepted, without effect.")
    service_tier: Literal["auto", "default", "flex", "priority"] | None = Field(
        None, description="`priority` goes first and `flex` last, within the priority of the principal."
    )
    speculation: SpeculationOptions | None = Field(None, description="How the answer is drafted.")
    workload: str | None = Field(None, description="Label under which acceptance is measured.")
    idempotency_key: str | None = Field(
        None, description="A repeat with the same key and request joins its session. Or by header."
    )
    continue_without_client: bool | None = Field(
        None, description="Go on to the end if the client leaves; a resumed stream has the rest."
    )
    no_audit: bool | None = Field(None, description="Leave this session out of audits by the gateway itself.")
    return_token_ids: bool | None = Field(
        None, description="Return `token_ids`, and in `from_draft` which of them a draft proposed."
    )


class ChoicesRequest(Parameters):
    """The parameters that chats and completions have in common."""

    n: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="Number of answers. Answer i has seed + i, and the prompt is read once.",
    )
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, lt=1 << 32, description="Most output tokens.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted, without effect.")
    return_rounds: bool | None = Field(
        None, description="Return `rounds`: the tokens and the time, by its parts, of each round."
    )
    response_format: ResponseFormat | None = Field(None, description="The language of the answer.")
    structured_outputs: StructuredOutputs | None = Field(None, description="The same, as vLLM has it.")
    prediction: Prediction | None = Field(None, description="Text that the answer probably contains.")


class ChatRequest(ChoicesRequest):
    messages: Few[ChatTurn] = Field(description="The conversation, for the model's chat template.")
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 32, description="Replaces max_tokens.")
    logprobs: bool | None = Field(None, description="Return the logprob of each token.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Number of most likely tokens to return.")
    tools: Tools | None = Field(None, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(None, description="Whether it may, or which of them it must.")
    parallel_tool_calls: bool | None = Field(
        None, description="False: at most one call an answer, where the form of calls is fixed."
    )


class CompletionRequest(ChoicesRequest):
    prompt: str | Few[str] | Ids | Few[Ids] = Field(
        description="Text, token ids, or a list of either; each prompt gets n answers."
    )
    logprobs: int | None = Field(None, ge=0, le=20, description="Number of most likely tokens to return.")
    echo: bool | None = Field(None, description="Begin the text of each answer with its prompt.")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Return one entry a prompt. Raise InvalidField if there are too many of them, or none."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or bool(prompt and isinstance(prompt[0], int))
        many: list[Any] = [prompt] if is_one else prompt
        if not 1 <= len(many) <= _MAX_PROMPTS:
            raise InvalidField("prompt", f"must have 1 to {_MAX_PROMPTS} entries, got {len(many)}")
        return many


# Parameters that are known and not served, with the values that ask for nothing besides those of _NOTHING.
_NOTHING: tuple[Any, ...] = (None, [], {}, "")
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (),
    "tool_choice": ("none", "auto"),
    "functions": (),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "store": (),
    "suffix": (),
    "best_of": (1,),
    "use_beam_search": (),
    "length_penalty": (1.0, 1),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "logits_processors": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "documents": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (),
    "echo": (),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (),
    "priority": (0,),
    "vllm_xargs": (),
    "kv_transfer_params": (),
    "tool_calls": (),
    "function_call_output": (),
    # Those of the Responses API, and those of chats that it names otherwise.
    "background": (),
    "context_management": (),
    "conversation": (),
    "max_tokens": (),
    "max_tool_calls": (),
    "n": (1,),
    "prompt": (),
    "reasoning": ({"effort": "none"},),
    "text": ({"format": {"type": "text"}}, {"format": {"type": "text"}, "verbosity": "medium"}),
    "truncation": ("disabled",),
}
_WITHOUT_EFFECT = frozenset(
    {"parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "refusal"}
)


def check_parameters(body: Open, *, strict: bool) -> dict[str, str]:
    """Return the headers that tell of ignored parameters. Raise InvalidField or Unimplemented."""
    unknown = _unknown_parameters(body)
    if unknown and strict:
        raise InvalidField(printable_name(unknown[0]), "must be a known parameter (--strict-parameters)")
    return {"warning": _warning_of(unknown)} if unknown else {}


def _unknown_parameters(body: Open) -> list[str]:
    """Return the names of parameters that are not known. Raise Unimplemented for one that is not served."""
    unknown: list[str] = []
    for prefix, part in _open_parts(body):
        has_unsupported = isinstance(part, Parameters | StreamOptions | ChatTurn)
        for name, value in (part.model_extra or {}).items():
            if has_unsupported and name in _UNSUPPORTED:
                if not _asks_for_nothing(value, _UNSUPPORTED[name]):
                    raise Unimplemented(prefix + name)
            elif name not in _WITHOUT_EFFECT and value is not None:
                unknown.append(prefix + name)
    return unknown


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return True for a neutral value. False is one where True is not, and equals no number."""
    if isinstance(value, bool):
        return value == any(one is True for one in neutral)
    return value in _NOTHING or any(value == one for one in neutral if not isinstance(one, bool))


def _open_parts(part: Open, prefix: str = "") -> Iterator[tuple[str, Open]]:
    """Yield the parts of a request whose unknown names are not used, each with the prefix of its names.

    The parts of turns, of which a request may have very many, are left out.
    """
    yield prefix, part
    if isinstance(part, ChatTurn):
        return
    for field, info in type(part).model_fields.items():
        value, name = getattr(part, field), prefix + (info.alias or field)
        if isinstance(value, Open) and not _uses_all_names(value):
            yield from _open_parts(value, f"{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Open):
            for index, one in enumerate(value):
                yield from _open_parts(one, f"{name}[{index}].")


def _uses_all_names(part: Open) -> bool:
    """Return True for a part that refuses unknown names, or passes them on."""
    is_tag = isinstance(part, ResponseFormat) and part.type == "structural_tag"
    return is_tag or isinstance(part, SpeculationOptions | StructuredOutputs)


def _warning_of(unknown: list[str]) -> str:
    """Return the `warning` header (RFC 9111) for ignored parameters."""
    named = ", ".join(printable_name(name) for name in unknown[:_MAX_SHOWN])
    more = f" and {len(unknown) - _MAX_SHOWN} more" if len(unknown) > _MAX_SHOWN else ""
    return f'299 galley "unknown parameters ignored: {named}{more}"'

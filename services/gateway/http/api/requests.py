"""Translate requests of the HTTP API into those of the wire, which are checked as those of gRPC are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count

from galley.common.models.tokenizer import Tokenizer
from galley.common.wire.codec import OPTIONAL_SAMPLING
from galley.core.errors import InvalidField, Unimplemented
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.http.api.schemas import (
    ChatRequest,
    ChatTurn,
    ChoicesRequest,
    CompletionRequest,
    Parameters,
    SpeculationOptions,
)
from services.gateway.http.parameters.parts import text_of
from services.gateway.http.parameters.structured import set_language, set_prediction
from services.gateway.http.parameters.tools import NamedTool
from services.gateway.http.tools.requests import ToolUse, tool_use

_PRIORITIES = {"flex": -1, "auto": 0, "default": 0, "priority": 1}
_MODES = {
    "auto": pb.Speculation.MODE_AUTO,
    "off": pb.Speculation.MODE_OFF,
    "fixed": pb.Speculation.MODE_FIXED,
}
_MOST_ID = (1 << 32) - 1
_PIECE_IDS = 8_192


def chat_request(body: ChatRequest, key: str) -> tuple[pb.GenerateRequest, ToolUse | None]:
    """Return the request of a chat without its tools and language, and its tools, if it has any.

    `key` is the idempotency key of the header.
    """
    request = common_request(body, key, body.max_completion_tokens or body.max_tokens)
    request.messages.messages.extend(map(chat_message, body.messages, count()))
    if body.logprobs:
        request.logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidField("top_logprobs", "must come with logprobs: true")
    set_prediction(request, body.prediction)
    functions = [tool.function for tool in body.tools or ()]
    choice = body.tool_choice.function if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    return request, tool_use(functions, choice, parallel=body.parallel_tool_calls, place=".function")


ROLES = {"developer": "system"}
"""OpenAI's newer names of roles, and those that chat templates know."""


def chat_message(turn: ChatTurn, index: int) -> pb.ChatMessage:
    """Return a turn of a chat. Raise InvalidField if it has no text and no calls."""
    content = "" if turn.content is None and turn.tool_calls else content_of(turn, index)
    return pb.ChatMessage(
        role=ROLES.get(turn.role, turn.role),
        content=content,
        name=turn.name or "",
        reasoning_content=turn.reasoning_content or "",
        tool_call_id=turn.tool_call_id or "",
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in turn.tool_calls or ()
        ],
    )


async def set_output(
    requests: Sequence[pb.GenerateRequest],
    body: ChoicesRequest,
    tools: ToolUse | None,
    tokenizer: Tokenizer,
    turn: asyncio.Lock,
) -> str:
    """Set tools and language of the answers, in slices within `turn`. Raise InvalidField or Unimplemented.

    Return the parameter that gives the language, empty if none does.
    """
    first, *others = requests
    language = await set_language(first, body.response_format, body.structured_outputs, turn)
    if tools is not None:
        language = await tools.set(first, tokenizer, language, turn)
    for other in others if language else ():
        other.structured_output.CopyFrom(first.structured_output)
        await asyncio.sleep(0)
    return language


async def completion_requests(body: CompletionRequest, key: str) -> list[pb.GenerateRequest]:
    """Return the request of each prompt, without the language of its answer."""
    if body.echo and body.logprobs is not None:
        raise Unimplemented("echo with logprobs")
    common = common_request(body, key, body.max_tokens)
    if body.logprobs is not None:
        common.logprobs = body.logprobs
    set_prediction(common, body.prediction)
    requests = []
    prompts: Sequence[str | list[int]] = body.prompts
    for index, prompt in enumerate(prompts):
        request = pb.GenerateRequest()
        request.CopyFrom(common)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            await _set_ids(request, prompt, f"prompt[{index}]")
        requests.append(request)
    return requests


def common_request(body: Parameters, key: str, max_tokens: int | None) -> pb.GenerateRequest:
    """Return the request without its prompt."""
    request = pb.GenerateRequest(
        model=body.model or "",
        sampling=_sampling(body),
        use_default_sampling=True,
        min_tokens=body.min_tokens or 0,
        stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
        ignore_eos=bool(body.ignore_eos),
        workload=body.workload or "",
        speculation=_speculation(body.speculation),
        idempotency_key=body.idempotency_key or key,
        priority=_PRIORITIES[body.service_tier or "default"],
        continue_without_client=bool(body.continue_without_client),
        no_audit=bool(body.no_audit),
    )
    if body.stop_token_ids:
        _check_ids("stop_token_ids", body.stop_token_ids)
        request.stop_token_ids.extend(body.stop_token_ids)
    if max_tokens is not None:
        request.max_tokens = max_tokens
    return request


def _sampling(body: Parameters) -> pb.SamplingParams:
    given = {name: value for name in OPTIONAL_SAMPLING if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    return pb.SamplingParams(**given, logit_bias=_biases(body.logit_bias or {}))


def content_of(turn: ChatTurn, index: int) -> str:
    """Return the text of a turn. Raise InvalidField if it has other content."""
    name = f"messages[{index}].content"
    if turn.content is None:
        raise InvalidField(name, "must be text or a list of parts of type text, got none")
    return text_of(turn.content, name)


def _speculation(options: SpeculationOptions | None) -> pb.Speculation:
    if options is None:
        return pb.Speculation(mode=pb.Speculation.MODE_AUTO)  # as the Python client sends it
    for name in options.model_extra or ():
        raise InvalidField(f"speculation.{name[:32]}", "must be mode, k, width or strategy")
    return pb.Speculation(
        mode=_MODES[options.mode], k=options.k, width=options.width, strategy=options.strategy
    )


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for token, bias in given.items():
        if not (token.isascii() and token.isdigit() and len(token) < 11 and int(token) <= _MOST_ID):
            raise InvalidField("logit_bias", f"must have token ids as names, got {token[:32]!r}")
        biases[int(token)] = bias
    return biases


async def _set_ids(request: pb.GenerateRequest, ids: Sequence[int], name: str) -> None:
    """Set the ids in pieces, between which others get a turn: a long list takes some 20 ms."""
    request.token_ids.SetInParent()
    for at in range(0, len(ids), _PIECE_IDS):
        piece = ids[at : at + _PIECE_IDS]
        _check_ids(name, piece, at)
        request.token_ids.ids.extend(piece)
        await asyncio.sleep(0)


def _check_ids(name: str, ids: Sequence[int], first: int = 0) -> None:
    """Raise InvalidField unless all ids fit into the wire; the vocabulary is checked with the request."""
    for index, token in enumerate(ids, first):
        if not 0 <= token <= _MOST_ID:
            raise InvalidField(f"{name}[{index}]", f"must be in [0, {_MOST_ID}], got {token}")

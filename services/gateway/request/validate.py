"""Validate requests, once, before any work is done for them."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from typing import Any, Protocol

from galley.common.models.tokenizer import TooManyTokens
from galley.common.wire.codec import MAX_SALT_BYTES, check_lora, check_token_ids, grammar_from, sampling_from
from galley.core.answer.answer import SessionSpec
from galley.core.content import HASH_BYTES
from galley.core.errors import (
    GrammarsUnavailable,
    InvalidField,
    Unimplemented,
    UnknownSession,
    check_length,
    check_range,
)
from galley.core.grammar.spec import KINDS, GrammarSpec
from galley.core.names import NO_STRATEGY
from galley.core.sampling_params import SamplingParams
from galley.core.trees import MAX_WIDTH
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.request.chat import chat_bytes, chat_messages, chat_tools, check_values

BODY_HASH_BYTES = 32
DEFAULT_MAX_TOKENS = 512
SESSION_ID_HEX = 32
_WORKLOAD = re.compile(r"[A-Za-z0-9_.:/-]*")
_SESSION_ID = re.compile(rf"[0-9a-f]{{{SESSION_ID_HEX}}}")
_FIXED_K = 4
"""Draft tokens a round in mode FIXED, where the request gives no number."""


class PromptTokenizer(Protocol):
    """Methods with `most_tokens` raise TooManyTokens if there are more."""

    def encode(self, text: str, most_tokens: int) -> list[int]: ...

    def encode_output(self, text: str, most_tokens: int) -> list[int]:
        """Return the token ids of a text that the model may write."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], most_tokens: int, tools: Sequence[Mapping[str, Any]]
    ) -> list[int]:
        """Return token ids that include the turn that opens the answer."""
        ...

    def tokens_of_reasoning(self, prompt: Sequence[int], *, is_chat: bool) -> tuple[int | None, int | None]:
        """Return the token that opens an answer's reasoning, and the one after which its grammar begins."""
        ...


class PromptRefused(InvalidField):
    """A prompt or prediction that is too long, alone or with the output, after `tokens` tokens were made."""

    def __init__(self, field: str, problem: str, tokens: int) -> None:
        super().__init__(field, problem)
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """The gateway's own bounds. `*_bytes` count UTF-8."""

    default_max_tokens: int = DEFAULT_MAX_TOKENS
    max_draft_tokens: int = 16
    max_text_bytes: int = 1 << 20
    max_messages: int = 1024
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_bytes: int = 256
    max_stop_token_ids: int = 256
    max_idempotency_key_bytes: int = 256
    max_workload_chars: int = 64


def _no_grammars(_: GrammarSpec) -> None:
    raise Unimplemented("structured_output")


@dataclass(frozen=True, slots=True)
class Model:
    """The served model. Token ids lie in [0, vocab_size), positions in [0, context_window).

    `default_k` is the most draft tokens a round in mode AUTO. `default_sampling` holds for what a request
    with `use_default_sampling` leaves unset. `lora_adapters` are those that targets offer now.
    `grammar_kinds` are those that targets decode by now. `compile_grammar` raises InvalidField for a grammar
    that cannot be used.
    """

    name: str
    context_window: int
    vocab_size: int
    strategies: tuple[str, ...] = ()
    lora_adapters: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    default_k: int = 0
    default_strategy: str = ""
    default_sampling: pb.SamplingParams | None = None
    grammar_kinds: tuple[str, ...] = KINDS
    compile_grammar: Callable[[GrammarSpec], object] = _no_grammars


@dataclass(frozen=True, slots=True)
class ResumeSpec:
    """The session, the index to resume at, and the hash of the output before it; empty: not checked."""

    session_id: str
    next_index: int
    seen_hash: bytes


def parse_generate(
    request: pb.GenerateRequest,
    limits: Limits,
    tokenizer: PromptTokenizer,
    model: Model,
    draw_seed: Callable[[], int],
) -> SessionSpec:
    """Return the session that `request` describes, without id, arrival and tenant salt.

    All of the request is checked, cheap things first; its prompt is tokenized last, and then its prediction.
    `draw_seed` gives the seed, in [0, 2**64), of a request that brings none. Raise InvalidField, and
    PromptRefused once the prompt was tokenized; GrammarsUnavailable if no target decodes by its grammar.
    """
    _check_fixed(request)
    lora = _lora(request, model)
    sampling = _sampling(request, model, draw_seed)
    stop = _stop(request.stop, limits)
    _check_stop_token_ids(request.stop_token_ids, limits, model.vocab_size)
    logprobs = _logprobs(request, limits)
    k, auto, strategy = _speculation(request.speculation, limits, model)
    width = _width(request.speculation)
    _check_labels(request, limits)
    _check_asked_length(request, model.context_window)
    grammar = _grammar(request, model)
    _check_prediction(request.prediction, limits, model)
    prompt = parse_prompt(request, limits, tokenizer, model)
    if grammar is not None and grammar.after_token is None:
        is_chat = request.WhichOneof("input") == "messages"
        opening, after = tokenizer.tokens_of_reasoning(prompt, is_chat=is_chat)
        grammar = replace(grammar, opening_token=opening, after_token=after)
    max_tokens = _max_tokens(request, len(prompt), limits, model.context_window)
    prediction = _prediction(request.prediction, len(prompt), tokenizer, model)
    own_ends = () if request.ignore_eos else model.eos_token_ids
    return SessionSpec(
        session_id="",
        prompt=prompt,
        sampling=sampling,
        max_position=len(prompt) + max_tokens,
        vocab_size=model.vocab_size,
        stop_token_ids=frozenset({*request.stop_token_ids, *own_ends}),
        stop_strings=stop,
        min_tokens=request.min_tokens,
        logprobs=logprobs,
        k=k,
        auto=auto,
        strategy=strategy,
        width=width,
        workload=request.workload,
        priority=request.priority,
        continue_without_client=request.continue_without_client,
        lora=lora,
        grammar=grammar,
        prediction=prediction,
        no_audit=request.no_audit,
    )


def body_hash(request: pb.GenerateRequest) -> bytes:
    """Return the blake2b-256 of the request without its idempotency key, the same for equal requests."""
    body = pb.GenerateRequest()
    body.CopyFrom(request)
    body.ClearField("idempotency_key")
    return blake2b(body.SerializeToString(deterministic=True), digest_size=BODY_HASH_BYTES).digest()


def parse_resume(request: pb.ResumeRequest) -> ResumeSpec:
    """Return the checked request. Raise InvalidField, or UnknownSession for a malformed session id."""
    session_id = parse_session_id(request.session_id)
    if len(request.seen_hash) not in {0, HASH_BYTES}:
        raise InvalidField(
            "seen_hash", f"must be empty or {HASH_BYTES} bytes, got {len(request.seen_hash)} bytes"
        )
    return ResumeSpec(session_id, request.next_index, request.seen_hash)


def parse_session_id(session_id: str) -> str:
    """Return the session id. Raise InvalidField if it is empty, UnknownSession if it is malformed."""
    if not session_id:
        raise InvalidField("session_id", "must not be empty")
    if not _SESSION_ID.fullmatch(session_id):
        raise UnknownSession(session_id[: 2 * SESSION_ID_HEX])
    return session_id


def check_priority(priority: int, most: int | None) -> None:
    """Raise InvalidField if the priority is above the caller's limit; None means no limit."""
    if most is not None and priority > most:
        raise InvalidField("priority", f"must be <= {most} for this caller, got {priority}")


def adapter_of(name: str, model: Model) -> str:
    """Return the LoRA adapter that a model's name means, empty for the served model. Raise InvalidField."""
    if name in {"", model.name}:
        return ""
    for adapter in (name, name.removeprefix(f"{model.name}:")):
        if adapter in model.lora_adapters:
            return adapter
    adapters = ", a LoRA adapter of it" if model.lora_adapters else ""
    raise InvalidField("model", f"must be {model.name!r}{adapters} or empty, got {_quoted(name)}")


def _lora(request: pb.GenerateRequest, model: Model) -> str:
    """Return the request's adapter, by `lora` or else by `model`."""
    named = adapter_of(request.model, model)
    lora = request.lora or named
    check_lora(lora, model.lora_adapters)
    if named not in {"", lora}:
        raise InvalidField("lora", f"must be {named!r} as in model, or empty, got {_quoted(lora)}")
    return lora


def _check_fixed(request: pb.GenerateRequest) -> None:
    if request.HasField("n") and request.n != 1:
        raise InvalidField("n", f"must be 1, got {request.n}")


def _sampling(request: pb.GenerateRequest, model: Model, draw_seed: Callable[[], int]) -> SamplingParams:
    message = pb.SamplingParams()
    if request.use_default_sampling and model.default_sampling is not None:
        message.CopyFrom(model.default_sampling)
    message.MergeFrom(request.sampling)
    sampling = sampling_from(message)
    sampling.validate(model.vocab_size)
    return sampling if message.HasField("seed") else replace(sampling, seed=draw_seed())


def _stop(stop: Sequence[str], limits: Limits) -> tuple[str, ...]:
    check_length("stop", stop, limits.max_stop_strings)
    for index, text in enumerate(stop):
        size = len(text.encode())
        if not 1 <= size <= limits.max_stop_bytes:
            raise InvalidField(f"stop[{index}]", f"must have 1 to {limits.max_stop_bytes} bytes, got {size}")
    return tuple(dict.fromkeys(stop))


def _check_stop_token_ids(ids: Sequence[int], limits: Limits, vocab_size: int) -> None:
    check_length("stop_token_ids", ids, limits.max_stop_token_ids)
    check_token_ids("stop_token_ids", ids, vocab_size)


def _logprobs(request: pb.GenerateRequest, limits: Limits) -> int | None:
    if not request.HasField("logprobs"):
        return None
    check_range("logprobs", request.logprobs, least=0, most=limits.max_logprobs)
    return request.logprobs


def _speculation(message: pb.Speculation, limits: Limits, model: Model) -> tuple[int, bool, str]:
    """Return the most draft tokens a round, True if fewer may be proposed, and the strategy."""
    if message.mode not in pb.Speculation.Mode.values():
        raise InvalidField("speculation.mode", f"must be a known mode, got {message.mode}")
    k = message.k if message.HasField("k") else None
    if k is not None:
        check_range("speculation.k", k, least=0, most=limits.max_draft_tokens)
    # Without a draft, a session can still propose what it knows itself.
    if message.strategy not in {"", NO_STRATEGY, *model.strategies}:
        known = ", ".join(dict.fromkeys((*model.strategies, NO_STRATEGY)))
        raise InvalidField("speculation.strategy", f"must be one of {known}, got {_quoted(message.strategy)}")
    strategy = message.strategy or model.default_strategy
    if message.mode == pb.Speculation.MODE_OFF:
        return 0, False, ""
    if message.mode == pb.Speculation.MODE_FIXED:
        return min(_FIXED_K, model.default_k) if k is None else k, False, strategy
    return model.default_k if k is None else min(k, model.default_k), True, strategy


def _width(message: pb.Speculation) -> int:
    """Return the most draft tokens for one position; 0 if the request does not say."""
    if message.HasField("width"):
        check_range("speculation.width", message.width, least=1, most=MAX_WIDTH)
    return 0 if message.mode == pb.Speculation.MODE_OFF else message.width


def _grammar(request: pb.GenerateRequest, model: Model) -> GrammarSpec | None:
    """Return the grammar of the request, if it has one, after it was compiled once."""
    if not request.HasField("structured_output"):
        return None
    grammar = grammar_from(request.structured_output)
    for name in ("after_token", "opening_token"):
        if (token := getattr(grammar, name)) is not None:
            check_range(f"structured_output.{name}", token, least=0, most=model.vocab_size - 1)
    if grammar.opening_token is not None and grammar.after_token is None:
        raise InvalidField("structured_output.opening_token", "must be absent without after_token")
    for name in ("ignore_eos", "min_tokens"):
        if value := getattr(request, name):
            problem = f"must be unset with structured_output, whose grammar decides on the end, got {value}"
            raise InvalidField(name, problem)
    if grammar.kind not in model.grammar_kinds:
        raise GrammarsUnavailable(grammar.kind)
    model.compile_grammar(grammar)
    return grammar


def _check_labels(request: pb.GenerateRequest, limits: Limits) -> None:
    check_length(
        "idempotency_key", request.idempotency_key.encode(), limits.max_idempotency_key_bytes, "bytes"
    )
    check_length("workload", request.workload.encode(), limits.max_workload_chars, "bytes")
    if not _WORKLOAD.fullmatch(request.workload):
        raise InvalidField(
            "workload", f"must have only letters, digits and _.:/-, got {_quoted(request.workload)}"
        )


def _check_asked_length(request: pb.GenerateRequest, context_window: int) -> None:
    """Check the output length as far as possible before the prompt is tokenized."""
    if not request.HasField("max_tokens"):
        return
    if not 1 <= request.max_tokens < context_window:
        raise InvalidField(
            "max_tokens",
            f"must be in [1, {context_window - 1}] (context window: {context_window} tokens), "
            f"got {request.max_tokens}",
        )
    if request.min_tokens > request.max_tokens:
        raise InvalidField(
            "min_tokens", f"must be <= max_tokens ({request.max_tokens}), got {request.min_tokens}"
        )


def parse_prompt(
    request: pb.GenerateRequest, limits: Limits, tokenizer: PromptTokenizer, model: Model
) -> tuple[int, ...]:
    """Return the token ids of the prompt, at least one. Raise InvalidField, or PromptRefused."""
    field, most = request.WhichOneof("input"), model.context_window - 1
    try:
        match field:
            case "text":
                prompt = _text_prompt(request.text, limits, tokenizer, most)
            case "messages":
                prompt = _chat_prompt(request.messages, limits, tokenizer, most)
            case "token_ids":
                prompt = _token_prompt(request.token_ids.ids, model)
            case _:
                raise InvalidField("input", "must have one of text, messages, token_ids, got none")
    except TooManyTokens as error:
        problem = f"must have at most {most} tokens (context window: {model.context_window})"
        raise PromptRefused(str(field), f"{problem}, got {error.tokens}", error.tokens) from None
    if not prompt:
        raise InvalidField(field, "must come to at least one token, got 0")
    return tuple(prompt)


def _check_prediction(prediction: pb.Prediction, limits: Limits, model: Model) -> None:
    """Check the predicted output as far as possible before anything is tokenized."""
    ids = prediction.token_ids.ids
    check_length("prediction.token_ids.ids", ids, model.context_window - 1)
    check_token_ids("prediction.token_ids.ids", ids, model.vocab_size)
    check_length("prediction.text", prediction.text.encode(), limits.max_text_bytes, "bytes")


def _prediction(
    prediction: pb.Prediction, prompt_len: int, tokenizer: PromptTokenizer, model: Model
) -> tuple[int, ...]:
    """Return the token ids of the predicted output, none if nothing is predicted. Raise PromptRefused."""
    if not prediction.text:
        return tuple(prediction.token_ids.ids)
    most = model.context_window - 1
    try:
        return tuple(tokenizer.encode_output(prediction.text, most))
    except TooManyTokens as error:
        problem = f"must have at most {most} tokens (context window: {model.context_window})"
        tokens = prompt_len + error.tokens
        raise PromptRefused("prediction.text", f"{problem}, got {error.tokens}", tokens) from None


def _text_prompt(text: str, limits: Limits, tokenizer: PromptTokenizer, most_tokens: int) -> Sequence[int]:
    if not text:
        raise InvalidField("text", "must not be empty")
    check_length("text", text.encode(), limits.max_text_bytes, "bytes")
    return tokenizer.encode(text, most_tokens)


def _chat_prompt(
    chat: pb.ChatMessages, limits: Limits, tokenizer: PromptTokenizer, most_tokens: int
) -> Sequence[int]:
    size = chat_bytes(chat)
    if size > limits.max_text_bytes:
        raise InvalidField("messages", f"must be at most {limits.max_text_bytes} bytes, got {size} bytes")
    messages, tools = chat_messages(chat.messages, limits.max_messages), chat_tools(chat.tools)
    check_values(messages, tools)
    return tokenizer.encode_chat(messages, most_tokens, tools)


def _token_prompt(ids: Sequence[int], model: Model) -> Sequence[int]:
    if not ids:
        raise InvalidField("token_ids.ids", "must not be empty")
    if len(ids) >= model.context_window:
        raise TooManyTokens(len(ids))
    check_token_ids("token_ids.ids", ids, model.vocab_size)
    return ids


def _max_tokens(request: pb.GenerateRequest, prompt_len: int, limits: Limits, context_window: int) -> int:
    room = context_window - prompt_len
    max_tokens = (
        request.max_tokens if request.HasField("max_tokens") else min(limits.default_max_tokens, room)
    )
    if max_tokens > room:
        raise PromptRefused(
            "max_tokens",
            f"must be <= {room} after a prompt of {prompt_len} tokens (context window: {context_window}), "
            f"got {max_tokens}",
            prompt_len,
        )
    if request.min_tokens > max_tokens:
        problem = f"must be <= max_tokens ({max_tokens}), got {request.min_tokens}"
        raise PromptRefused("min_tokens", problem, prompt_len)
    return max_tokens


def _quoted(text: str, most: int = 64) -> str:
    return repr(text if len(text) <= most else text[:most] + "...")


def session_id_for(principal: str, key: str, secret: bytes) -> str:
    """Return a 128-bit session id in hex: random, or an HMAC of (principal, key) if `key` is not empty.

    A repeat of a request gets the same id and joins its session; principals get different ids for equal keys.
    """
    if not key:
        return secrets.token_hex(SESSION_ID_HEX // 2)
    message = principal.encode() + b"\0" + key.encode()
    return hmac.new(secret, message, sha256).hexdigest()[:SESSION_ID_HEX]


def tenant_salt_for(principal: str, secret: bytes) -> bytes:
    """Return the salt that separates a principal's caches, the same at all gateways of one `secret`.

    Leases name cached blocks by hashes that start from it, so whoever reads leases cannot test guessed
    prompts. It uses another hash function than session ids, which callers see.
    """
    return hmac.digest(secret, principal.encode(), blake2b)[:MAX_SALT_BYTES]

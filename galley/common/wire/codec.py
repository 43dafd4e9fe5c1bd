"""Convert protobuf messages that several services share to and from types of `galley.core`.

Each request to a pool carries a slice of its session. `read_slice` validates the slice before the replica
does any work for the request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import MappingProxyType

from galley.core.content import HASH_BYTES
from galley.core.errors import InvalidField, check_length
from galley.core.grammar.spec import HASH_BYTES as GRAMMAR_HASH_BYTES
from galley.core.grammar.spec import KINDS, GrammarSpec
from galley.core.records import PositionLogprobs
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.messages import Slice
from galley.pb.galley.v1 import galley_pb2 as pb

MAX_SESSION_ID_BYTES = 256
MAX_SALT_BYTES = 16
# Adapters that an error lists; characters of a wrong name that it quotes.
_MOST_NAMED, _MOST_QUOTED = 16, 64
# Where the proto tells an unset field from 0, unset means the core's default.
OPTIONAL_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)
_DEFAULTS = {name: getattr(SamplingParams(), name) for name in OPTIONAL_SAMPLING if name != "seed"}


def sampling_from(message: pb.SamplingParams) -> SamplingParams:
    """Return unvalidated parameters, with defaults for unset fields.

    Floats keep the 32 bits of the wire, so that every service computes with the same values.
    """
    given = {name: getattr(message, name) for name in OPTIONAL_SAMPLING if message.HasField(name)}  # type: ignore[arg-type]  # a literal union
    if message.logit_bias:
        given["logit_bias"] = MappingProxyType(dict(message.logit_bias))
    return SamplingParams(**given)


def sampling_message(params: SamplingParams) -> pb.SamplingParams:
    """Return a message with the seed and each field that differs from its default."""
    message = pb.SamplingParams(seed=params.seed, logit_bias=params.logit_bias)
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value != default:
            setattr(message, name, value)
    return message


def logprobs_from(message: pb.PositionLogprobs) -> PositionLogprobs:
    """Return the natural logs of the chosen token and of the likeliest tokens."""
    return PositionLogprobs(message.logprob, tuple((top.token_id, top.logprob) for top in message.top))


def logprobs_message(logprobs: PositionLogprobs) -> pb.PositionLogprobs:
    top = [pb.TokenLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return pb.PositionLogprobs(logprob=logprobs.logprob, top=top)


def read_slice(
    message: pb.SessionSlice, *, vocab_size: int, context_window: int, tokens: Sequence[int] | None = None
) -> Slice:
    """Return the slice. Raise InvalidField if no replica of this model can serve it.

    `tokens` are those of the message, if they were read and checked before.
    """
    check_identity(message)
    check_positions(message, context_window)
    if tokens is None:
        tokens = list(message.tokens)
        check_token_ids("slice.tokens", tokens, vocab_size)
    read = Slice(
        key=(message.tenant_salt, message.session_id),
        start=message.start,
        tokens=tokens,
        prefix_hash=message.prefix_hash,
        prompt_len=message.prompt_len,
        max_position=message.max_position,
        sampling=sampling_from(message.sampling),
        stop_token_ids=frozenset(message.stop_token_ids),
        min_tokens=message.min_tokens,
        grammar=grammar_from(message.structured_output) if message.HasField("structured_output") else None,
        grammar_hash=message.grammar_hash,
    )
    _check_grammar(read)
    check_token_ids("slice.stop_token_ids", sorted(read.stop_token_ids), vocab_size)
    read.sampling.validate(vocab_size)
    return read


def grammar_from(message: pb.StructuredOutput) -> GrammarSpec:
    """Return the grammar, which is not compiled yet. Raise InvalidField if it has no kind."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidField("structured_output", f"must have one of {', '.join(KINDS)}, got none")
    match kind:
        case "json_object":
            text = ""
        case "choice":
            text = json.dumps(list(message.choice.choices), ensure_ascii=False)
        case _:
            text = getattr(message, kind)
    after = message.after_token if message.HasField("after_token") else None
    opening = message.opening_token if message.HasField("opening_token") else None
    return GrammarSpec(kind, text, after, opening)


def grammar_message(spec: GrammarSpec) -> pb.StructuredOutput:
    """Return the inverse of `grammar_from`."""
    message = pb.StructuredOutput(after_token=spec.after_token, opening_token=spec.opening_token)
    match spec.kind:
        case "json_object":
            message.json_object.SetInParent()
        case "choice":
            message.choice.choices.extend(json.loads(spec.text))
            message.choice.SetInParent()
        case kind:
            setattr(message, kind, spec.text)
    return message


def check_token_ids(field: str, tokens: Sequence[int], vocab_size: int, first: int = 0) -> None:
    """Raise InvalidField for the first id outside the vocabulary; `first` is the index of the first token."""
    if tokens and (max(tokens) >= vocab_size or min(tokens) < 0):
        index, token = next((i, t) for i, t in enumerate(tokens, first) if not 0 <= t < vocab_size)
        raise InvalidField(f"{field}[{index}]", f"token id must be in [0, {vocab_size}), got {token}")


def check_lora(lora: str, offered: Sequence[str]) -> None:
    """Raise InvalidField unless the LoRA adapter is offered; every target serves the model itself (empty)."""
    if lora and lora not in offered:
        known = ", ".join(offered[:_MOST_NAMED])
        must = f"must be empty or one of {known}" if known else "must be empty: no LoRA adapter is offered"
        raise InvalidField("lora", f"{must}, got {lora[:_MOST_QUOTED]!r}")


def check_identity(message: pb.SessionSlice) -> None:
    """Raise InvalidField unless the names of the session and the hash of its prefix are within bounds."""
    salt, session_id = message.tenant_salt, message.session_id
    if not 0 < len(session_id.encode()) <= MAX_SESSION_ID_BYTES:
        raise InvalidField(
            "slice.session_id", f"must be 1 to {MAX_SESSION_ID_BYTES} bytes, got {len(session_id.encode())}"
        )
    check_length("slice.tenant_salt", salt, MAX_SALT_BYTES, "bytes")
    if len(message.prefix_hash) != HASH_BYTES:
        raise InvalidField("slice.prefix_hash", f"must be {HASH_BYTES} bytes, got {len(message.prefix_hash)}")


def _check_grammar(read: Slice) -> None:
    if read.grammar is not None and read.grammar.content_hash != read.grammar_hash:
        raise InvalidField("slice.grammar_hash", "must be the hash of slice.structured_output")
    if len(read.grammar_hash) not in {0, GRAMMAR_HASH_BYTES}:
        size = len(read.grammar_hash)
        raise InvalidField("slice.grammar_hash", f"must be empty or {GRAMMAR_HASH_BYTES} bytes, got {size}")
    if read.grammar_hash and read.min_tokens:
        problem = f"must be 0 with a grammar, which decides on the end, got {read.min_tokens}"
        raise InvalidField("slice.min_tokens", problem)


def check_positions(message: pb.SessionSlice, context_window: int) -> None:
    """Raise InvalidField unless the context window holds the tokens and at least one more."""
    position = message.start + len(message.tokens)
    if not message.tokens:
        raise InvalidField("slice.tokens", "must not be empty")
    if position > context_window:
        raise InvalidField(
            "slice.tokens", f"must end within the context window of {context_window}, got end {position}"
        )
    if message.max_position > context_window:
        raise InvalidField(
            "slice.max_position",
            f"must be <= the context window of {context_window}, got {message.max_position}",
        )
    if position >= message.max_position:
        raise InvalidField(
            "slice.max_position", f"must be > the {position} confirmed tokens, got {message.max_position}"
        )
    if not 0 < message.prompt_len <= position:
        raise InvalidField(
            "slice.prompt_len", f"must be in [1, {position}] (confirmed tokens), got {message.prompt_len}"
        )

"""What every item to a pool says of its session: read from the wire and validated before any work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galley.common.wire.codec import sampling_from
from galley.core.content import HASH_BYTES, SessionKey
from galley.core.errors import InvalidField
from galley.core.sampling_params import SamplingParams
from galley.pb.galley.v1 import galley_pb2 as pb

MAX_SESSION_ID_BYTES = 256
MAX_SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Slice:
    """Confirmed tokens [start, start + len(tokens)) of a session, and how it is to go on."""

    key: SessionKey
    start: int
    tokens: Sequence[int]
    prefix_hash: bytes
    prompt_len: int
    max_position: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    min_tokens: int

    @property
    def position(self) -> int:
        """Of the first token that is not confirmed yet: n."""
        return self.start + len(self.tokens)


def read_slice(message: pb.SessionSlice, *, vocab_size: int, context_window: int) -> Slice:
    """Raises InvalidField, naming field and bound, for whatever no replica of this model could serve."""
    read = Slice(
        key=(message.tenant_salt, message.session_id),
        start=message.start,
        tokens=list(message.tokens),
        prefix_hash=message.prefix_hash,
        prompt_len=message.prompt_len,
        max_position=message.max_position,
        sampling=sampling_from(message.sampling),
        stop_token_ids=frozenset(message.stop_token_ids),
        min_tokens=message.min_tokens,
    )
    _check_identity(read)
    _check_positions(read, context_window)
    check_token_ids("slice.tokens", read.tokens, vocab_size)
    check_token_ids("slice.stop_token_ids", sorted(read.stop_token_ids), vocab_size)
    read.sampling.validate(vocab_size)
    return read


def check_token_ids(field: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidField, naming the first, if a token id stands outside the vocabulary."""
    if tokens and max(tokens) >= vocab_size:
        index, token = next((i, t) for i, t in enumerate(tokens) if t >= vocab_size)
        raise InvalidField(f"{field}[{index}]", f"token id must be in [0, {vocab_size}), is {token}")


def _check_identity(read: Slice) -> None:
    salt, session_id = read.key
    if not 0 < len(session_id.encode()) <= MAX_SESSION_ID_BYTES:
        raise InvalidField("slice.session_id", f"must have 1 to {MAX_SESSION_ID_BYTES} bytes")
    if len(salt) > MAX_SALT_BYTES:
        raise InvalidField("slice.tenant_salt", f"must have at most {MAX_SALT_BYTES} bytes, has {len(salt)}")
    if len(read.prefix_hash) != HASH_BYTES:
        raise InvalidField("slice.prefix_hash", f"must have {HASH_BYTES} bytes, has {len(read.prefix_hash)}")


def _check_positions(read: Slice, context_window: int) -> None:
    if not read.tokens:
        raise InvalidField("slice.tokens", "must not be empty")
    if read.position > context_window:
        raise InvalidField(
            "slice.tokens", f"must end within the context window of {context_window}, at {read.position}"
        )
    if read.max_position > context_window:
        raise InvalidField(
            "slice.max_position", f"must be <= the context window of {context_window}, is {read.max_position}"
        )
    if read.position >= read.max_position:
        raise InvalidField(
            "slice.max_position", f"must be > the {read.position} confirmed tokens, is {read.max_position}"
        )
    if not 0 < read.prompt_len <= read.position:
        raise InvalidField(
            "slice.prompt_len", f"must be in [1, {read.position}], the confirmed tokens, is {read.prompt_len}"
        )

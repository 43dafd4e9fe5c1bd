"""The answer of one session: its tokens, what is known of each, its text, and whether it has ended.

Everything here is a function of the session's request and of its tokens alone, so a gateway that takes a
session over rebuilds it from the log and comes to the same text and the same end.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from galley.core.answer.text import TextStream
from galley.core.content import PrefixHasher, prefix_hash
from galley.core.records import PositionLogprobs, TokenRecord
from galley.core.sampling_params import SamplingParams

# A replay of a long answer comes in messages that any client takes.
MAX_CHUNK_TOKENS = 256


class Reason(enum.Enum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Ending:
    """`matched` is the stop string or the id of the stop token that ended the answer."""

    reason: Reason
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """All that an answer depends on besides the target build, and how to go about it.

    `max_position` bounds positions, prompt included (exclusive). `k` is 0 where speculation is off, and else
    the most draft tokens that are verified in a round; with `auto`, as many of them are drafted as pay, down
    to none. An empty `strategy` leaves the choice to the draft. `continue_without_client`: a client that goes
    away does not stop the work.
    """

    session_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_position: int
    vocab_size: int
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    k: int = 0
    auto: bool = False
    strategy: str = ""
    workload: str = ""
    arrival_ns: int = 0
    priority: int = 0
    tenant_salt: bytes = b""
    continue_without_client: bool = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive output tokens of one origin; `index` counts output tokens."""

    index: int
    tokens: tuple[int, ...]
    text: str
    from_draft: bool
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class NumericsChanged:
    """From output token `index` on another target build computes."""

    index: int
    fingerprint: str


class Answer:
    """Tokens confirmed so far, from absolute position 0."""

    def __init__(self, spec: SessionSpec, decode: Callable[[Sequence[int]], str]) -> None:
        self.spec = spec
        self.tokens: list[int] = list(spec.prompt)
        # Every round names prefixes of them.
        self._hasher = PrefixHasher()
        self.records: list[TokenRecord] = []
        self.ending: Ending | None = None
        self.fingerprint: str | None = None
        self._texts: list[str] = []
        self._stream = TextStream(decode, spec.prompt, spec.stop_strings)

    @property
    def output(self) -> list[int]:
        """The output tokens."""
        return self.tokens[len(self.spec.prompt) :]

    @property
    def output_len(self) -> int:
        """How many output tokens there are."""
        return len(self.records)

    def prefix_hash(self, length: int) -> bytes:
        """The content address of the first `length` tokens, which are there."""
        return self._hasher.digest(self.tokens, length)

    def extended_hash(self, guesses: Sequence[int]) -> bytes:
        """The content address of all tokens and these guesses after them."""
        return self._hasher.extended_digest(self.tokens, guesses)

    def output_hash(self, length: int) -> bytes:
        """The content address of the first `length` output tokens, as a client computes it."""
        start = len(self.spec.prompt)
        return prefix_hash(self.tokens[start : start + length])

    def append(self, token: int, record: TokenRecord) -> bool:
        """Append one confirmed token; false once the answer has ended: what follows is cut."""
        if self.ending is not None:
            return False
        self.tokens.append(token)
        self.records.append(record)
        if record.fingerprint is not None:
            self.fingerprint = record.fingerprint
        text, self.ending = self._read(token)
        self._texts.append(text)
        return self.ending is None

    def _read(self, token: int) -> tuple[str, Ending | None]:
        spec = self.spec
        may_stop = self.output_len > spec.min_tokens
        if may_stop and token in spec.stop_token_ids:
            return self._stream.flush(), Ending(Reason.STOP, token)
        piece = self._stream.push(token, may_stop=may_stop)
        if piece.stop is not None:
            return piece.text, Ending(Reason.STOP, piece.stop)
        if len(self.tokens) >= spec.max_position:
            return piece.text + self._stream.flush(), Ending(Reason.LENGTH)
        return piece.text, None

    def chunks(self, start: int, end: int) -> Iterator[Chunk | NumericsChanged]:
        """What a client is told of output tokens [start, end), cut where the origin changes."""
        while start < end:
            fingerprint = self.records[start].fingerprint
            if fingerprint is not None and start > 0:
                yield NumericsChanged(start, fingerprint)
            stop = self._same_origin(start, end)
            yield self._chunk(start, stop)
            start = stop

    def texts(self, start: int, end: int) -> list[str]:
        """What each of the output tokens [start, end) adds to the text."""
        return self._texts[start:end]

    def _same_origin(self, start: int, end: int) -> int:
        first = self.records[start]
        end = min(end, start + MAX_CHUNK_TOKENS)
        for index in range(start + 1, end):
            record = self.records[index]
            if record.from_draft != first.from_draft or record.fingerprint is not None:
                return index
        return end

    def _chunk(self, start: int, end: int) -> Chunk:
        records = self.records[start:end]
        offset = len(self.spec.prompt)
        return Chunk(
            index=start,
            tokens=tuple(self.tokens[offset + start : offset + end]),
            text="".join(self._texts[start:end]),
            from_draft=records[0].from_draft,
            logprobs=tuple(r.logprobs for r in records if r.logprobs is not None),
        )

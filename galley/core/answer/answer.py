"""The answer of one session: its tokens, their records, its text, and whether it has ended.

Everything here depends only on the session's request and tokens. A gateway that takes over a session rebuilds
it from the log and gets the same text and the same end.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

from galley.core.answer.text import TextStream
from galley.core.content import PrefixHasher, token_bytes, tokens_from_bytes
from galley.core.grammar.spec import GrammarSpec
from galley.core.records import PositionLogprobs, TokenRecord
from galley.core.sampling_params import SamplingParams
from galley.core.values import value

_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]
"""Work in steps, between which others may have a turn."""

# Tokens of a prediction that are converted in one step, in up to 1 ms.
_PIECE_TOKENS = 32 * 1024
_PIECE_BYTES = 4 * _PIECE_TOKENS
# Bounds the messages in which a resumed stream replays a long answer; encoding logprobs takes 0.1 ms a token.
MAX_CHUNK_TOKENS, MAX_LOGPROBS_CHUNK_TOKENS = 64, 16


class Reason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an answer. `matched` is the stop string or stop token id that ended it, else None."""

    reason: Reason
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The request of a session: what its answer depends on besides the target build, and how to compute it.

    `max_position` bounds positions, prompt included (exclusive). `k` is the most draft tokens verified in a
    round; 0 turns speculation off. With `auto`, as many are drafted as pay, down to none. `width` is the most
    draft tokens for one position; 0 is 1, or with `auto` what the gateway chooses. An empty `strategy` leaves
    the choice to the draft. With `continue_without_client`, work goes on after the client disconnects.
    `lora` names a LoRA adapter; empty: the model itself. The output belongs to the language of `grammar`, if
    there is one, and probably contains the tokens of `prediction`. With `no_audit`, no gateway audits it by
    itself.
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
    width: int = 0
    workload: str = ""
    arrival_ns: int = 0
    priority: int = 0
    tenant_salt: bytes = b""
    continue_without_client: bool = False
    lora: str = ""
    grammar: GrammarSpec | None = None
    prediction: tuple[int, ...] = ()
    no_audit: bool = False


@value
class Chunk:
    """Consecutive output tokens; `index` is that of the first, from 0.

    `from_draft` says for each token whether it was drafted. If some were and others were not, `text_ends` has
    for each the length of `text` up to its end.
    """

    index: int
    tokens: tuple[int, ...]
    text: str
    from_draft: tuple[bool, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    text_ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NumericsChanged:
    """Another target build computes from output token `index` on."""

    index: int
    fingerprint: str


class Answer:
    """The tokens confirmed so far, from absolute position 0."""

    def __init__(self, spec: SessionSpec, decode: Callable[[Sequence[int]], str]) -> None:
        self.spec = spec
        self.tokens: list[int] = list(spec.prompt)
        # Every round needs hashes of prefixes.
        self._hasher = PrefixHasher()
        self._output_hasher = PrefixHasher(len(spec.prompt))
        self.records: list[TokenRecord] = []
        self.ending: Ending | None = None
        self.fingerprint: str | None = None
        self._builds: list[tuple[int, str]] = []
        """The builds that computed the output, each with the index of its first token."""
        self._texts: list[str] = []
        self._held_lengths: dict[int, int] = {}
        """How much text is held back after an output token, by index; 0 for those that are absent."""
        self._stream = TextStream(decode, spec.prompt, spec.stop_strings)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.spec.prompt) :]

    @property
    def output_len(self) -> int:
        return len(self.records)

    def prefix_hash(self, length: int) -> bytes:
        return self._hasher.digest(self.tokens, length)

    def extended_hash(self, draft_tokens: Sequence[int]) -> bytes:
        return self._hasher.extended_digest(self.tokens, draft_tokens)

    def output_hash(self, length: int) -> bytes:
        """Return the content address of the first `length` output tokens, as a client computes it."""
        return self._output_hasher.digest(self.tokens, length)

    def build_of(self, index: int) -> str | None:
        """Return the fingerprint of the build that computed output token `index`, None if none has."""
        return next((build for start, build in reversed(self._builds) if start <= index), None)

    def append(self, token: int, record: TokenRecord) -> bool:
        """Append one confirmed token. Return False once the answer has ended: further tokens are cut."""
        if self.ending is not None:
            return False
        self.tokens.append(token)
        self.records.append(record)
        if record.fingerprint is not None:
            self.fingerprint = record.fingerprint
            self._builds.append((self.output_len - 1, record.fingerprint))
        text, self.ending = self._read(token)
        self._texts.append(text)
        if length := self._stream.held_length:
            self._held_lengths[self.output_len - 1] = length
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
        """Yield output tokens [start, end) as a client receives them, split where the build changes."""
        most = MAX_CHUNK_TOKENS if self.spec.logprobs is None else MAX_LOGPROBS_CHUNK_TOKENS
        while start < end:
            fingerprint = self.records[start].fingerprint
            if fingerprint is not None and start > 0:
                yield NumericsChanged(start, fingerprint)
            changes = (at for at, _ in self._builds if at > start)
            stop = min(end, start + most, next(changes, end))
            yield self._chunk(start, stop)
            start = stop

    def texts(self, start: int, end: int) -> list[str]:
        return self._texts[start:end]

    def held_length(self, index: int) -> int:
        """Return how many characters of the text up to output token `index` come with later tokens."""
        return self._held_lengths.get(index, 0)

    def _chunk(self, start: int, end: int) -> Chunk:
        if end == start + 1:  # mostly, and in a third of the time
            record, token = self.records[start], self.tokens[len(self.spec.prompt) + start]
            logprobs = () if record.logprobs is None else (record.logprobs,)
            return Chunk(start, (token,), self._texts[start], (record.from_draft,), logprobs)
        records, texts = self.records[start:end], self._texts[start:end]
        offset = len(self.spec.prompt)
        from_draft = tuple([record.from_draft for record in records])
        return Chunk(
            start,
            tuple(self.tokens[offset + start : offset + end]),
            "".join(texts),
            from_draft,
            tuple([r.logprobs for r in records if r.logprobs is not None]),
            tuple(accumulate(map(len, texts))) if len(set(from_draft)) > 1 else (),
        )


def encode_spec(spec: SessionSpec) -> bytes:
    """Return everything of `spec`, as JSON, except its id and prompt (key and log hold them).

    Fields at their default are left out, to keep a session small. The defaults of SessionSpec and
    SamplingParams are therefore part of the stored format: they mean "not set" and must not change.
    """
    return result_of(encoding(spec))


def encoding(spec: SessionSpec) -> Steps[bytes]:
    """Return the steps of `encode_spec`: one, or with a long `prediction` several, of 1 to 2 ms each."""
    fields = _changed(spec)
    del fields["session_id"], fields["prompt"]
    fields["sampling"] = _changed(spec.sampling)
    if "logit_bias" in fields["sampling"]:
        fields["sampling"]["logit_bias"] = dict(spec.sampling.logit_bias)
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = sorted(spec.stop_token_ids)
    if "tenant_salt" in fields:
        fields["tenant_salt"] = spec.tenant_salt.hex()
    if spec.grammar is not None:
        fields["grammar"] = [getattr(spec.grammar, name) for name in _GRAMMAR_FIELDS]
    if "prediction" in fields:
        words = bytearray()
        for at in range(0, len(spec.prediction), _PIECE_TOKENS):
            words += token_bytes(spec.prediction[at : at + _PIECE_TOKENS])
            if len(spec.prediction) > _PIECE_TOKENS:
                yield
        fields["prediction"] = b64encode(words).decode()
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def decode_spec(data: bytes, session_id: str, prompt: tuple[int, ...]) -> SessionSpec:
    """Return the inverse of `encode_spec`. Raise ValueError, KeyError or TypeError for invalid `data`."""
    return result_of(decoding(data, session_id, prompt))


def decoding(data: bytes, session_id: str, prompt: tuple[int, ...]) -> Steps[SessionSpec]:
    """Return the steps of `decode_spec`: one, or with a long `prediction` several, of 1 to 2 ms each."""
    fields: dict[str, Any] = json.loads(data)
    sampling = fields.pop("sampling")
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {int(token): bias for token, bias in sampling["logit_bias"].items()}
    if "stop_token_ids" in fields:
        fields["stop_token_ids"] = frozenset(fields["stop_token_ids"])
    if "stop_strings" in fields:
        fields["stop_strings"] = tuple(fields["stop_strings"])
    if "tenant_salt" in fields:
        fields["tenant_salt"] = bytes.fromhex(fields["tenant_salt"])
    if "grammar" in fields:
        fields["grammar"] = GrammarSpec(*fields["grammar"])
    if "prediction" in fields:
        is_long = len(fields["prediction"]) > _PIECE_BYTES
        if is_long:
            yield
        words = b64decode(fields["prediction"], validate=True)
        prediction: list[int] = []
        for at in range(0, len(words), _PIECE_BYTES):
            prediction += tokens_from_bytes(words[at : at + _PIECE_BYTES])
            if is_long:
                yield
        fields["prediction"] = tuple(prediction)
    return SessionSpec(session_id=session_id, prompt=prompt, sampling=SamplingParams(**sampling), **fields)


def result_of(steps: Steps[_T]) -> _T:
    """Take all steps at once; return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: _T = done.value
            return result


def encode_ending(ending: Ending) -> bytes:
    return json.dumps({"reason": ending.reason.value, "matched": ending.matched}).encode()


def decode_ending(data: bytes) -> Ending:
    fields = json.loads(data)
    return Ending(Reason(fields["reason"]), fields["matched"])


def _changed(values: SessionSpec | SamplingParams) -> dict[str, Any]:
    fields = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    defaults = _DEFAULTS[type(values)]
    return {name: value for name, value in fields.items() if value != defaults.get(name, _NONE)}


_NONE = object()
_GRAMMAR_FIELDS = [field.name for field in dataclasses.fields(GrammarSpec) if field.init]
_DEFAULTS: dict[type, dict[str, Any]] = {
    kind: {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(kind)
    }
    for kind in (SessionSpec, SamplingParams)
}

"""Read the answers of stored sessions, in slices, so that the event loop stays free for other calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from itertools import islice
from typing import TypeAlias, TypeVar

from galley.core.answer.answer import Answer, SessionSpec, Steps, decoding, encoding
from galley.core.content import RunningHash
from galley.core.errors import LogLost
from galley.core.lookup.prediction import counting
from galley.core.records import TokenRecord, decode_records
from galley.core.store import StoredSession

_T = TypeVar("_T")
Entry: TypeAlias = tuple[int, TokenRecord]
"""An output token of a log, with its record."""

SPEC_FIELD = "spec"
_PIECE_TOKENS = 32 * 1024
"""Tokens that are hashed or compared before other calls get a turn: about 1 ms."""
SLICE_TOKENS = 32
"""Tokens replayed before other calls get a turn: about 1 ms, or 3 ms with logprobs."""
_SHORT_STOPS = 256
"""Characters of stop strings whose automaton takes up to 0.3 ms."""


class Replays:
    """The replays of one gateway; together they replay one slice before other tasks get a turn."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._turn = asyncio.Lock()

    async def begin(self, spec: SessionSpec) -> Answer:
        """Return an answer without output; one that takes long to make has turns of its own.

        Long stop strings take 4 ms. Short answers are made at once: many new streams would wait for each
        other's turns.
        """
        if len(spec.prompt) <= _PIECE_TOKENS and sum(map(len, spec.stop_strings)) <= _SHORT_STOPS:
            return Answer(spec, self._decode)
        async with self._turn:
            await asyncio.sleep(0)
            answer = Answer(spec, self._decode)
            for length in range(_PIECE_TOKENS, len(spec.prompt), _PIECE_TOKENS):
                await asyncio.sleep(0)
                answer.prefix_hash(length)
            await asyncio.sleep(0)
        return answer

    async def encode(self, spec: SessionSpec) -> bytes:
        """Return `encode_spec`, in slices."""
        return await _in_turns(encoding(spec), self._turn)

    async def spec_of(self, stored: StoredSession) -> SessionSpec:
        """Return the request of a stored session. Raise LogLost if it cannot be read."""
        return await read_spec(stored, self._turn)

    async def replay(self, stored: StoredSession, spec: SessionSpec | None = None) -> Answer:
        """Return the answer that the log holds; `spec` is its request, if that was read already.

        Raise LogLost if the session cannot be read.
        """
        answer = await self.begin(spec or await self.spec_of(stored))
        output = stored.tokens[stored.prompt_len :]
        await self._append(answer, zip(output, decode_records(stored.meta), strict=True))
        return answer

    async def extend(self, answer: Answer, before: StoredSession, stored: StoredSession) -> Answer:
        """Return the answer of `stored`, given that of `before`, an earlier reading of the session."""
        if not await _in_turns(_extending(before, stored), self._turn):
            return await self.replay(stored)  # the store had lost its latest writes
        length, size = len(before.tokens), len(before.meta)
        further = zip(stored.tokens[length:], decode_records(stored.meta[size:]), strict=True)
        await self._append(answer, further)
        return answer

    async def output_hash(self, stored: StoredSession, length: int) -> bytes:
        """Return the content address of the first `length` output tokens of a stored session, or of all."""
        return await _in_turns(_hashing(stored, length), self._turn)

    async def count_drafted(self, stored: StoredSession) -> int:
        """Return how many output tokens of a stored session a draft proposed. Raise LogLost."""
        drafted = 0

        def count(batch: Sequence[Entry]) -> None:
            nonlocal drafted
            drafted += sum(record.from_draft for _, record in batch)

        output = stored.tokens[stored.prompt_len :]
        await self._read(zip(output, decode_records(stored.meta), strict=True), count)
        return drafted

    async def count_predicted(self, stored: StoredSession, prediction: Sequence[int]) -> int:
        """Return how many tokens of the prediction the output of a stored session has."""
        accepted, _ = await _in_turns(counting(prediction, stored.tokens[stored.prompt_len :]), self._turn)
        return accepted

    async def _append(self, answer: Answer, entries: Iterable[Entry]) -> None:
        def append(batch: Sequence[Entry]) -> None:
            for token, record in batch:
                answer.append(token, record)
            # The session's first step needs both, of all that is replayed.
            answer.prefix_hash(len(answer.tokens))
            answer.output_hash(answer.output_len)

        await self._read(entries, append)

    async def _read(self, entries: Iterable[Entry], take: Callable[[Sequence[Entry]], None]) -> None:
        """Let `take` have the entries, in slices. Raise LogLost if they cannot be decoded."""
        entries = iter(entries)
        more = True
        while more:
            async with self._turn:
                try:
                    batch = list(islice(entries, SLICE_TOKENS))
                except ValueError as error:
                    raise LogLost("the stored session cannot be read") from error
                take(batch)
                more = len(batch) == SLICE_TOKENS
                if more:
                    await asyncio.sleep(0)


async def read_spec(
    stored: StoredSession, turn: AbstractAsyncContextManager[object] | None = None
) -> SessionSpec:
    """Return the request of a stored session, read in slices within `turn`. Raise LogLost."""
    return await _in_turns(_decoding(stored), turn or nullcontext())


async def _in_turns(steps: Steps[_T], turn: AbstractAsyncContextManager[object]) -> _T:
    """Take the steps in turns of their own, but the first at once."""
    try:
        next(steps)
        while True:
            async with turn:
                await asyncio.sleep(0)
                next(steps)
    except StopIteration as done:
        result: _T = done.value
        return result


def _hashing(stored: StoredSession, length: int) -> Steps[bytes]:
    running, end = RunningHash(), min(stored.prompt_len + length, len(stored.tokens))
    for at in range(stored.prompt_len, end, _PIECE_TOKENS):
        running.add(stored.tokens[at : min(at + _PIECE_TOKENS, end)])
        if at + _PIECE_TOKENS < end:
            yield
    return running.digest()


def _extending(before: StoredSession, stored: StoredSession) -> Steps[bool]:
    """Compare in steps: return True if the log of `stored` begins with that of `before`."""
    if not stored.meta.startswith(before.meta):
        return False
    length = len(before.tokens)
    for at in range(0, length, _PIECE_TOKENS):
        end = min(at + _PIECE_TOKENS, length)
        if stored.tokens[at:end] != before.tokens[at:end]:
            return False
        if end < length:
            yield
    return True


def _decoding(stored: StoredSession) -> Steps[SessionSpec]:
    prompt = tuple(stored.tokens[: stored.prompt_len])
    try:
        data = stored.fields[SPEC_FIELD]
        return (yield from decoding(data, stored.ownership.session_id, prompt))
    except (ValueError, KeyError, TypeError) as error:
        raise LogLost("the stored session cannot be read") from error

"""Rebuild the answers of stored sessions, in slices, so that the event loop stays free for other calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from galley.core.answer.answer import Answer, SessionSpec, decode_spec
from galley.core.errors import LogLost
from galley.core.records import TokenRecord, decode_records
from galley.core.store import StoredSession

SPEC_FIELD = "spec"
_PIECE_TOKENS = 32 * 1024
"""Tokens of a prompt that are hashed before other calls get a turn: about 1 ms."""
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

    async def replay(self, stored: StoredSession) -> Answer:
        """Return the answer that the log holds. Raise LogLost if a record cannot be read."""
        answer = await self.begin(stored_spec(stored))
        output = stored.tokens[stored.prompt_len :]
        await self._append(answer, zip(output, decode_records(stored.meta), strict=True))
        return answer

    async def extend(self, answer: Answer, before: StoredSession, stored: StoredSession) -> Answer:
        """Return the answer of `stored`, given that of `before`, an earlier reading of the session."""
        length, size = len(before.tokens), len(before.meta)
        if stored.tokens[:length] != before.tokens or stored.meta[:size] != before.meta:
            return await self.replay(stored)  # the store had lost its latest writes
        further = zip(stored.tokens[length:], decode_records(stored.meta[size:]), strict=True)
        await self._append(answer, further)
        return answer

    async def _append(self, answer: Answer, entries: Iterable[tuple[int, TokenRecord]]) -> None:
        entries = iter(entries)
        more = True
        while more:
            async with self._turn:
                try:
                    batch = list(islice(entries, SLICE_TOKENS))
                except ValueError as error:
                    raise LogLost("the stored session cannot be read") from error
                for token, record in batch:
                    answer.append(token, record)
                more = len(batch) == SLICE_TOKENS
                if more:
                    await asyncio.sleep(0)


def stored_spec(stored: StoredSession) -> SessionSpec:
    prompt = tuple(stored.tokens[: stored.prompt_len])
    try:
        return decode_spec(stored.fields[SPEC_FIELD], stored.ownership.session_id, prompt)
    except (ValueError, KeyError, TypeError) as error:
        raise LogLost("the stored session cannot be read") from error

"""The answer of a finished session as its log has it, with the builds that computed it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from galley.core.answer.answer import SessionSpec
from galley.core.errors import LogLost
from galley.core.records import decode_records
from galley.core.store import StoredSession
from services.gateway.session.replay import read_spec

_PIECE_TOKENS = 32 * 1024
_SLICE_RECORDS = 256
"""Tokens that are compared, and records that are read, before others get a turn: about 1 ms with logprobs."""


@dataclass(frozen=True, slots=True)
class BuildRange:
    """The tokens at positions [start, end) were computed by the build `fingerprint`."""

    start: int
    end: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class LoggedAnswer:
    """`tokens` is prompt and output; `ranges` divide the output by builds. `replica` computed last."""

    spec: SessionSpec
    tokens: Sequence[int]
    ranges: Sequence[BuildRange]
    replica: str = ""

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - len(self.spec.prompt)

    def builds(self) -> list[str]:
        """Return the fingerprints of the builds, that of the most tokens first."""
        tokens: Counter[str] = Counter()
        for part in self.ranges:
            tokens[part.fingerprint] += part.end - part.start
        return [fingerprint for fingerprint, _ in tokens.most_common()]

    def ranges_of(self, fingerprint: str) -> list[BuildRange]:
        return [part for part in self.ranges if part.fingerprint == fingerprint]


async def logged_answer(stored: StoredSession) -> LoggedAnswer:
    """Return the answer of a stored session. Raise LogLost if it cannot be read, or no target computed it."""
    spec, length = await read_spec(stored), len(stored.tokens)
    if length > spec.max_position or await _largest(stored.tokens) >= spec.vocab_size:
        raise LogLost("the log has tokens that no target draws")
    starts: list[tuple[int, str]] = []
    position = stored.prompt_len
    try:
        for record in decode_records(stored.meta):
            if record.fingerprint is not None:
                starts.append((position, record.fingerprint))
            position += 1
            if not position % _SLICE_RECORDS:
                await asyncio.sleep(0)
    except ValueError as error:
        raise LogLost("the stored session cannot be read") from error
    if position != length:
        raise LogLost(f"the log has {length} tokens, and records of {position}")
    ends = [*(start for start, _ in starts[1:]), length][: len(starts)]
    ranges = [BuildRange(start, end, name) for (start, name), end in zip(starts, ends, strict=True)]
    target = stored.directory.target
    return LoggedAnswer(spec, stored.tokens, ranges, "" if target is None else target.replica)


async def _largest(tokens: Sequence[int]) -> int:
    largest = []
    for at in range(0, len(tokens), _PIECE_TOKENS):
        await asyncio.sleep(0)
        largest.append(max(tokens[at : at + _PIECE_TOKENS]))
    return max(largest)

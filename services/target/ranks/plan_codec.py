"""Encode a step as flat int32 numbers for the other ranks: no pickle, nothing to execute."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from galley.core.errors import Broken
from galley.core.step import StepChunk

_RUN, _STOP, _RUN_TRACED = 1, 2, 3
_SPAN = struct.Struct("<6i")


@dataclass(frozen=True, slots=True)
class RankStep:
    """The part of a step that all ranks run; only rank 0 knows how its rows are sampled.

    `span` names the step in a trace, by trace id and span id; empty if it is not traced.
    """

    chunks: tuple[StepChunk, ...]
    copies: tuple[tuple[int, int], ...]
    span: bytes = b""


def encode(chunks: Sequence[StepChunk], copies: Sequence[tuple[int, int]], span: bytes = b"") -> list[int]:
    """Return [kind, copies, chunks, (from, to)..., (start, want_logits, tokens, blocks, ids...)...].

    For a traced step, the span's 24 bytes follow the kind, as six numbers. A chunk's ids are its tokens,
    then its blocks.
    """
    numbers = [_RUN_TRACED, *_SPAN.unpack(span)] if span else [_RUN]
    numbers += (len(copies), len(chunks))
    for source, destination in copies:
        numbers += (source, destination)
    for chunk in chunks:
        numbers += (chunk.start, chunk.want_logits, len(chunk.tokens), len(chunk.blocks))
        numbers += chunk.tokens
        numbers += chunk.blocks
    return numbers


def encode_stop() -> list[int]:
    """Return the numbers that stop the other ranks."""
    return [_STOP]


def decode(numbers: Sequence[int]) -> RankStep | None:
    """Return the encoded step; None for a stop. Raises Broken for anything else."""
    left = iter(numbers)
    kind = _take(left, 1)[0]
    if kind == _STOP:
        return None
    if kind not in (_RUN, _RUN_TRACED):
        raise Broken(f"plan: kind must be 1, 2 or 3, got {kind}")
    span = _SPAN.pack(*_take(left, 6)) if kind == _RUN_TRACED else b""
    copy_count, chunk_count = _take(left, 2)
    flat = _take(left, 2 * copy_count)
    copies = tuple(zip(flat[::2], flat[1::2], strict=True))
    chunks = tuple(_chunk(left) for _ in range(chunk_count))
    if next(left, None) is not None:
        raise Broken("plan: must end after its last chunk, got more numbers")
    return RankStep(chunks, copies, span)


def _chunk(left: Iterator[int]) -> StepChunk:
    start, want_logits, token_count, block_count = _take(left, 4)
    return StepChunk(start, _take(left, token_count), _take(left, block_count), want_logits)


def _take(left: Iterator[int], count: int) -> list[int]:
    taken = [number for _, number in zip(range(count), left, strict=False)]
    if len(taken) < count:
        raise Broken("plan: must hold all numbers that it counts, is cut short")
    return taken

"""A pass as flat int32 numbers, as rank 0 sends it to the other ranks: no pickle, nothing to execute."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from galley.core.errors import Broken
from galley.core.step import StepChunk

_RUN, _STOP, _RUN_TRACED = 1, 2, 3
_SPAN = struct.Struct("<6i")


@dataclass(frozen=True, slots=True)
class Pass:
    """What the ranks run together; how its rows are sampled only rank 0 knows.

    `span` names the pass in a trace, by trace id and span id; empty where it has none.
    """

    chunks: tuple[StepChunk, ...]
    copies: tuple[tuple[int, int], ...]
    span: bytes = b""


def encode(chunks: Sequence[StepChunk], copies: Sequence[tuple[int, int]], span: bytes = b"") -> list[int]:
    """[kind, copies, chunks, (from, to)..., (start, want_logits, tokens, blocks, token..., block...)...].

    Where the pass is traced, the span's 24 bytes follow the kind, as six numbers.
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
    """Tells the other ranks that nothing follows."""
    return [_STOP]


def decode(numbers: Sequence[int]) -> Pass | None:
    """The pass that was encoded; None for a stop. Raises Broken if it is neither."""
    left = iter(numbers)
    kind = _take(left, 1)[0]
    if kind == _STOP:
        return None
    if kind not in (_RUN, _RUN_TRACED):
        raise Broken(f"a rank was sent a plan of kind {kind}")
    span = _SPAN.pack(*_take(left, 6)) if kind == _RUN_TRACED else b""
    copy_count, chunk_count = _take(left, 2)
    flat = _take(left, 2 * copy_count)
    copies = tuple(zip(flat[::2], flat[1::2], strict=True))
    chunks = tuple(_chunk(left) for _ in range(chunk_count))
    if next(left, None) is not None:
        raise Broken("a rank was sent a plan with something behind its end")
    return Pass(chunks, copies, span)


def _chunk(left: Iterator[int]) -> StepChunk:
    start, want_logits, token_count, block_count = _take(left, 4)
    return StepChunk(start, _take(left, token_count), _take(left, block_count), want_logits)


def _take(left: Iterator[int], count: int) -> list[int]:
    taken = [number for _, number in zip(range(count), left, strict=False)]
    if len(taken) < count:
        raise Broken("a rank was sent a plan that is cut short")
    return taken

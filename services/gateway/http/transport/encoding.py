"""JSON without spaces, as every response and event has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

_T = TypeVar("_T")
_PIECE, _PIECE_TOKENS = 512, 4096
_NO_JSON: Mapping[str, bytes] = MappingProxyType({})
_SLICE = 2048
"""Values that are encoded in a slice; 64 characters of a text, or bits of an integer, count as one more."""
_PIECE_COST = 4
"""So many values are encoded at once in the time of a piece by Python code."""

to_text = json.JSONEncoder(separators=(",", ":")).encode
UNICODE = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
"""As `to_text`, but each character as itself: shorter, for what is stored, compiled or part of a prompt."""


def to_json(value: object) -> bytes:
    return to_text(value).encode()


def with_json(
    fields: Mapping[str, Any], name: str, value: bytes, more: Mapping[str, bytes] = _NO_JSON
) -> bytes:
    """Return the JSON of an object of `fields`, one more and `more`, whose values are JSON already."""
    added = b"".join(b',"%b":%b' % (key.encode(), data) for key, data in {name: value, **more}.items())
    return b"%b%b}" % (to_json(fields)[:-1], added)


async def list_json(
    values: Sequence[_T], entry: Callable[[_T], object], turn: asyncio.Lock, size: int = _PIECE
) -> bytes:
    """Return the list of the `entry` of each value, made in slices of `size`, of about 1 ms or less."""

    def entries(at: slice) -> bytes:
        return to_json([entry(value) for value in values[at]])[1:-1]

    return b"[%b]" % b",".join(await in_slices(len(values), size, entries, turn))


async def tokens_json(
    tokens: Sequence[int], records: Sequence[_T], is_drafted: Callable[[_T], bool], turn: asyncio.Lock
) -> dict[str, bytes]:
    """Return the JSON of what `return_token_ids` asks for, made in slices."""
    return {
        "token_ids": await list_json(tokens, int, turn, _PIECE_TOKENS),
        "from_draft": await list_json(records, is_drafted, turn, _PIECE_TOKENS),
    }


async def in_slices(length: int, size: int, work: Callable[[slice], _T], turn: asyncio.Lock) -> list[_T]:
    """Return what `work` returns for each slice; of an empty sequence, for one empty slice.

    Others get a turn after each slice, and all who share the lock `turn` take one at a time.
    """
    done = []
    for at in range(0, max(1, length), size):
        async with turn:
            done.append(work(slice(at, at + size)))
            await asyncio.sleep(0)
    return done


async def json_texts(
    values: Sequence[object], turn: asyncio.Lock, encoder: json.JSONEncoder = UNICODE
) -> list[str]:
    """Return the JSON of each value, made in slices of about a millisecond, each within `turn`."""
    if _is_small(values):
        return [*map(encoder.encode, values)]
    texts = []
    for value in values:
        if _is_small(value):
            async with turn:
                await asyncio.sleep(0)
                texts.append(encoder.encode(value))
            continue
        pieces, text = encoder.iterencode(value), ""
        while part := await _next_slice(pieces, turn):
            text += part
        texts.append(text)
    return texts


async def json_text(value: object, turn: asyncio.Lock, encoder: json.JSONEncoder = UNICODE) -> str:
    """Return the JSON of a value, made as `json_texts` makes it."""
    [text] = await json_texts([value], turn, encoder)
    return text


async def _next_slice(pieces: Iterator[str], turn: asyncio.Lock) -> str:
    """Return what the encoder's Python code makes next in a slice: slower, but it can be interrupted."""
    taken, left = [], _SLICE
    async with turn:
        await asyncio.sleep(0)
        for piece in pieces:
            taken.append(piece)
            left -= _PIECE_COST + len(piece) // 64
            if left < 0:
                break
    return "".join(taken)


def _is_small(value: object) -> bool:
    """Return True if a slice can encode the value at once."""
    rest, left = [value], _SLICE
    while rest and left >= 0:
        item = rest.pop()
        left -= 1
        if isinstance(item, str):
            left -= len(item) // 64
        elif isinstance(item, int):
            left -= item.bit_length() // 64
        elif isinstance(item, list | tuple):
            rest += item
        elif isinstance(item, dict):
            rest += item
            rest += item.values()
    return left >= 0

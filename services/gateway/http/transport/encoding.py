"""JSON without spaces, as every response and event has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")
_PIECE = 512

to_text = json.JSONEncoder(separators=(",", ":")).encode
to_unicode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
"""As `to_text`, but each character as itself: shorter, for what is stored, compiled or part of a prompt."""


def to_json(value: object) -> bytes:
    return to_text(value).encode()


def with_json(fields: Mapping[str, Any], name: str, value: bytes) -> bytes:
    """Return the JSON of an object of `fields` and one more, whose value is JSON already."""
    return b'%b,"%b":%b}' % (to_json(fields)[:-1], name.encode(), value)


async def list_json(values: Sequence[_T], entry: Callable[[_T], object]) -> bytes:
    """Return the list of the `entry` of each value, made in pieces of some milliseconds or less."""
    pieces = []
    for at in range(0, len(values), _PIECE):
        pieces.append(to_json([entry(value) for value in values[at : at + _PIECE]])[1:-1])
        await asyncio.sleep(0)
    return b"[%b]" % b",".join(pieces)

"""Read the JSON of a body in steps that hold the event loop for a few milliseconds each.

Parsing takes 50 to 100 ns a value, up to 700 ns a name of an object, and little for texts; meanwhile nothing
else runs, in whichever thread. So the values of a large body are counted first, and lists of token ids, which
may be long, are parsed in pieces.
"""

from __future__ import annotations

import asyncio
import math
import re
from array import array
from typing import Any

from pydantic_core import from_json

from services.gateway.http.transport.errors import Refused

_SMALL_BYTES = 64 * 1024
_PIECE_BYTES = 64 * 1024
_MOST_VALUES = 1 << 15
_MOST_NAMES = 1 << 13
MOST_IDS = 1 << 18
"""Most token ids of a list, or of a list of lists."""
_ID_LISTS = ("prompt", "tokens")
_MOST_LISTS = 1 << 10
_MOST_TRIES = 16
# A search through millions of spaces would hold the event loop.
_LIST = re.compile(rb"\s{0,64}:\s{0,64}(?=\[)")
_NEXT = re.compile(rb"\s{0,64}(\S)")
_PLACE = "\x00ids"
_MOST_BITS = 1024
_LONG_NUMBER = re.compile(rb"[^0-9.][0-9]{310}")
_TOO_LARGE = "a number is too large"


async def read_json(body: bytes) -> Any:
    """Return the value of a body; NaN is refused. Raise ValueError, or Refused if it holds too much.

    A long list of token ids is an array: it needs no further check, and garbage collections skip it.
    """
    if len(body) <= _SMALL_BYTES:
        return _finite(_parse(body)) if body else None
    await asyncio.sleep(0)  # this turn has copied the body
    for name in _ID_LISTS:
        if (value := await _with_id_list(body, name)) is not None:
            break
    else:
        await _check_counts(body)
        value = _parse(body)
    await asyncio.sleep(0)  # its check is a step of its own
    _finite(value)
    await asyncio.sleep(0)
    return value


def _parse(body: bytes) -> Any:
    return from_json(body, allow_inf_nan=False)


def _finite(value: Any) -> Any:
    """Return the value. Raise ValueError for a number beyond a double, which from_json reads as infinite.

    Integers are no exception: to write a long one takes time that grows with the square of its length.
    """
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, float):
            if math.isinf(item):
                raise ValueError(_TOO_LARGE)
        elif isinstance(item, int):
            if item.bit_length() > _MOST_BITS:
                raise ValueError(_TOO_LARGE)
        elif isinstance(item, dict):
            rest += item.values()
        elif isinstance(item, list):
            rest += item
    return value


async def _with_id_list(body: bytes, name: str) -> Any:
    """Return the value of a body whose parameter `name` is a list of numbers, or of such; otherwise None."""
    start = _list_of(body, b'"%b"' % name.encode())
    if start < 0:
        return None
    try:
        ids, end = await _ids(body, start, name)
    except ValueError:
        return None
    rest = b'%b"\\u0000ids"%b' % (body[:start], body[end:])
    await _check_counts(rest)
    value = _parse(rest)
    if not isinstance(value, dict) or value.get(name) != _PLACE:
        return None
    return {**value, name: ids}


def _list_of(body: bytes, key: bytes) -> int:
    """Return where a list begins that `key` names, or -1. Within a text, the key's last quote is escaped."""
    at = 0
    for _ in range(_MOST_TRIES):
        at = body.find(key, at) + len(key)
        if at < len(key):
            return -1
        if (begin := _LIST.match(body, at)) is not None:
            return begin.end()
    return -1


async def _ids(body: bytes, start: int, name: str) -> tuple[list[Any] | array[int], int]:
    """Return the numbers of the list at `start`, or its lists of them, and its end. Raise ValueError."""
    char, at = _next(body, start + 1)
    if char != b"[":
        return await _numbers(body, start, MOST_IDS, name)
    lists: list[Any] = []
    left = MOST_IDS
    while char == b"[" and len(lists) < _MOST_LISTS:
        numbers, end = await _numbers(body, at, left, name)
        left -= len(numbers)
        lists.append(numbers)
        char, at = _next(body, end)
        if char == b",":
            char, at = _next(body, at + 1)
        elif char == b"]":
            return lists, at + 1
    raise ValueError


async def _numbers(body: bytes, start: int, most: int, name: str) -> tuple[array[int], int]:
    """Return the numbers of the list at `start`, and its end. Raise ValueError if it holds anything else.

    A piece that parses by itself ends between two entries: a text or list that was cut does not parse.
    """
    numbers = array("q")
    at = start + 1
    while True:
        comma = body.find(b",", at + _PIECE_BYTES)
        close = body.find(b"]", at, comma if comma >= 0 else len(body))
        if comma < 0 and close < 0:
            raise ValueError
        end = close if close >= 0 else comma
        if end - at > 2 * _PIECE_BYTES:
            raise ValueError
        piece = _parse(b"[%b]" % body[at:end])
        if {*map(type, piece)} - {int} or (piece and max(map(abs, piece)) >= 1 << 63):
            raise ValueError
        numbers.extend(piece)
        if len(numbers) > most:
            raise Refused(400, "invalid_argument", f"{name}: must have at most {MOST_IDS} token ids", name)
        await asyncio.sleep(0)
        if close >= 0:
            return numbers, close + 1
        at = comma + 1


def _next(body: bytes, at: int) -> tuple[bytes, int]:
    """Return the next character from `at` that is no space, and its place. Raise ValueError without one."""
    if (found := _NEXT.match(body, at)) is None:
        raise ValueError
    return found[1], found.start(1)


async def _check_counts(body: bytes) -> None:
    """Raise Refused if there are too many values or names outside of texts to parse them at once.

    Raise ValueError for a long number, which takes as long as many values.
    """
    values = names = in_text = at = 0
    while at < len(body):
        piece = body[at : at + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = body[at : at + _PIECE_BYTES + 1]  # what is escaped belongs to its backslash
        at += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        bare = b"".join(parts[in_text::2])
        in_text ^= (len(parts) - 1) % 2
        values += bare.count(b",") + bare.count(b"[") + bare.count(b"{")
        names += bare.count(b":")
        if _LONG_NUMBER.search(bare):
            raise ValueError(_TOO_LARGE)
        if values > _MOST_VALUES:
            raise Refused(400, "invalid_argument", f"body: must have at most {_MOST_VALUES} values")
        if names > _MOST_NAMES:
            raise Refused(400, "invalid_argument", f"body: must have at most {_MOST_NAMES} names of objects")
        await asyncio.sleep(0)

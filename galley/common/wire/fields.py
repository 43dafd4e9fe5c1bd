"""Messages on the wire: bound their fields before they are parsed.

Parsing takes 50 to 100 ns a field and cannot be interrupted: 2 MB of empty messages would hold the event loop
for 50 ms. Here fields are counted on the wire, in slices, and only as far as the bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

SMALL_BYTES = 64 * 1024
"""The fields of a smaller message are not counted: whatever it holds is parsed within 3 ms."""
_SLICE_FIELDS = 1024
_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
"""Wire types."""
_LONGEST_VARINT_BITS = 70


async def check_fields(data: bytes, message: Descriptor, most: int, most_numbers_bytes: int = 0) -> None:
    """Raise ValueError if `data` has more than `most` fields, those of the messages within it included.

    A packed list of numbers is one field; together these have at most `most_numbers_bytes`, unless it is 0.
    """
    numbers_bytes = 0
    for count, size in enumerate(_list_sizes(data, message), 1):
        numbers_bytes += size
        if count > most:
            raise ValueError(f"must have at most {most} fields, with lists of numbers packed, got more")
        if numbers_bytes > most_numbers_bytes > 0:
            raise ValueError(f"must have at most {most_numbers_bytes} bytes of lists of numbers, got more")
        if count % _SLICE_FIELDS == 0:
            await asyncio.sleep(0)


def _list_sizes(data: bytes, message: Descriptor) -> Iterator[int]:
    """Yield for each field its size if it is a packed list of numbers, else 0.

    Leave out what follows a mistake in the message that holds it: there the parser stops, too.
    """
    parts = [(0, len(data), message)]
    while parts:
        at, end, kind = parts.pop()
        lists, messages = _sized_fields(kind)
        while at < end:
            try:
                key, at = _varint_at(data, at)
                wire, number, size = key & 7, key >> 3, 0
                if wire == _SIZED:
                    size, at = _varint_at(data, at)
                    if number in messages:
                        parts.append((at, min(at + size, end), messages[number]))
                    at += size
                elif wire == _VARINT:
                    _, at = _varint_at(data, at)
                elif wire in {_FIXED64, _FIXED32}:
                    at += 8 if wire == _FIXED64 else 4
            except IndexError:
                break
            yield size if number in lists else 0


@cache
def _sized_fields(message: Descriptor) -> tuple[frozenset[int], dict[int, Descriptor]]:
    """Return which fields are lists of numbers, and the types of those that are messages."""
    fields = message.fields_by_number
    texts = {FieldDescriptor.CPPTYPE_STRING, FieldDescriptor.CPPTYPE_MESSAGE}
    lists = frozenset(number for number, field in fields.items() if field.cpp_type not in texts)
    return lists, {number: field.message_type for number, field in fields.items() if field.message_type}


def varint(value: int) -> bytes:
    """Return a number as the wire has it."""
    coded = bytearray()
    while value >= 0x80:
        coded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*coded, value))


def _varint_at(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, and where it ends. Raise IndexError if it does not end."""
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift == _LONGEST_VARINT_BITS:
            raise IndexError
    return value | byte << shift, at + 1

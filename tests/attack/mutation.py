"""Messages between valid and noise, from a seed: fields that are what they should not be, bytes cut off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTS = (0, 1, 2, 3, 7, 16, 17, 64, 255, 256, 1023, 1024, 1025, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 1e-45, 1e38, 101.0, math.nan, math.inf, -math.inf)
_WORDS = (
    *(
        "",
        "a",
        "\0",
        "é" * 40,
        "\u202e",
        "😀",
        "%s%n",
        "{{7*7}}",
        "../../etc/passwd",
        "' OR 1=1 --",
        "${jndi:x}",
    ),
    *("model", "ngram", "none", "user", "assistant", "<|end|>", "*", "galley.v1.Target", "a\r\nb: c"),
)
_SIZES = (1, 15, 16, 17, 31, 32, 33, 255, 256, 257, 1000, 20_000)
_COUNTS = (1, 1, 2, 5, 20, 300, 1030)
_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


class Mutator:
    """The same random numbers, the same messages."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def bytes_of(self, message: Message) -> bytes:
        """The message as it is, or changed in some fields, or as bytes that are no message at all."""
        kind = self._random.random()
        if kind < 0.05:
            return self._random.randbytes(self._random.choice((0, 1, 2, 5, 20, 200, 5000)))
        if kind < 0.2:
            return message.SerializeToString()
        if kind < 0.85:
            for _ in range(self._random.choice((1, 1, 1, 2, 4))):
                self._change(self._random.choice(_tree(message)))
        data = message.SerializeToString()
        return self._spoiled(data) if kind > 0.7 else data

    def _change(self, message: Message) -> None:
        """One field of this message."""
        fields: Sequence[Any] = message.DESCRIPTOR.fields
        if not fields:
            return
        field = self._random.choice(fields)
        if field.is_repeated:
            self._change_list(message, field)
        elif self._random.random() < 0.15:
            message.ClearField(field.name)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
        else:
            setattr(message, field.name, self._scalar(field))

    def _change_list(self, message: Message, field: FieldDescriptor) -> None:
        entries: Any = getattr(message, field.name)
        count = self._random.choice(_COUNTS)
        if self._random.random() < 0.2:
            message.ClearField(field.name)
        elif field.message_type is None:
            entries.extend(self._scalar(field) for _ in range(count))
        elif field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for _ in range(count):
                entries[self._scalar(key)] = self._scalar(value)
        elif entries:
            entries.extend([self._random.choice(entries)] * count)
        else:
            entries.add()

    def _scalar(self, field: FieldDescriptor) -> Any:
        kind = field.cpp_type
        if kind in _BOUNDS:
            low, high = _BOUNDS[kind]
            value = self._random.choice((self._random.choice(_INTS), -self._random.choice(_INTS), low, high))
            return value if low <= value <= high else self._random.randint(low, high)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self._random.random() < 0.5
        if kind == FieldDescriptor.CPPTYPE_STRING:
            return self._text(field)
        return self._random.choice((*_FLOATS, self._random.uniform(-3, 3)))

    def _text(self, field: FieldDescriptor) -> str | bytes:
        size = self._random.choice(_SIZES)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self._random.randbytes(size)
        if self._random.random() < 0.3:
            return "x" * size
        return self._random.choice(_WORDS)

    def _spoiled(self, data: bytes) -> bytes:
        """Some bytes otherwise, gone, twice, or new ones among them."""
        spoiled = bytearray(data)
        ways: Sequence[Callable[[bytearray, int, int], None]] = (_flip, _cut, _double, _end, self._insert)
        for _ in range(self._random.choice((1, 1, 2, 8))):
            at = self._random.randrange(len(spoiled) + 1)
            self._random.choice(ways)(spoiled, at, self._random.choice((1, 1, 2, 9, 50)))
        return bytes(spoiled)

    def _insert(self, data: bytearray, at: int, count: int) -> None:
        noise = (self._random.randbytes(count), b"\xff" * count, b"\x80" * count + b"\x01", b"\x0b" * count)
        data[at:at] = self._random.choice(noise)


def _tree(message: Message) -> list[Message]:
    """The message and all within it."""
    found = [message]
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            found += _tree(part)
    return found


def _flip(data: bytearray, at: int, count: int) -> None:
    if data:
        data[at % len(data)] ^= 1 << count % 8


def _cut(data: bytearray, at: int, count: int) -> None:
    del data[at : at + count]


def _double(data: bytearray, at: int, count: int) -> None:
    data[at:at] = data[at : at + count]


def _end(data: bytearray, at: int, _count: int) -> None:
    del data[at:]

"""Mutate messages from a seed: fields with wrong values, corrupt bytes, noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_INTS = (0, 1, 2, 3, 7, 16, 17, 64, 255, 256, 1023, 1024, 1025, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1)
_FLOATS = (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 1e-45, 1e38, 101.0, math.nan, math.inf, -math.inf)
_WORDS = (
    *("", "a", "\0", "é" * 40, "\u202e", "😀", "%s%n", "{{7*7}}", "../../etc/passwd", "' OR 1=1 --"),
    *("${jndi:x}", "model", "ngram", "none", "user", "assistant", "<|end|>", "*", "galley.v1.Target"),
    "a\r\nb: c",
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
    def __init__(self, random: Random) -> None:
        self._random = random

    def bytes_of(self, message: Message) -> bytes:
        """Return the message unchanged, with changed fields, or as bytes that are no message."""
        kind = self._random.random()
        if kind < 0.05:
            return self._random.randbytes(self._random.choice((0, 1, 2, 5, 20, 200, 5000)))
        if kind < 0.2:
            return message.SerializeToString()
        if kind < 0.85:
            for _ in range(self._random.choice((1, 1, 1, 2, 4))):
                self._change(self._random.choice(_tree(message)))
        data = message.SerializeToString()
        return self._corrupt(data) if kind > 0.7 else data

    def _change(self, message: Message) -> None:
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

    def _corrupt(self, data: bytes) -> bytes:
        corrupt = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 8))):
            at, count = self._random.randrange(len(corrupt) + 1), self._random.choice((1, 1, 2, 9, 50))
            match self._random.randrange(5):
                case 0 if corrupt:
                    corrupt[at % len(corrupt)] ^= 1 << count % 8
                case 1:
                    del corrupt[at : at + count]
                case 2:
                    corrupt[at:at] = corrupt[at : at + count]
                case 3:
                    del corrupt[at:]
                case _:
                    corrupt[at:at] = self._noise(count)
        return bytes(corrupt)

    def _noise(self, count: int) -> bytes:
        tags = (b"\xff" * count, b"\x80" * count + b"\x01", b"\x0b" * count)
        return self._random.choice((self._random.randbytes(count), *tags))


def _tree(message: Message) -> list[Message]:
    results = [message]
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else (value,):
            results += _tree(part)
    return results

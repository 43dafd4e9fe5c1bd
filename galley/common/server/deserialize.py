"""Requests that cannot be read are the caller's fault: INVALID_ARGUMENT, with the field or the bound named.

grpc.aio answers INTERNAL when a deserializer raises, so here a message that does not parse becomes a value,
and the handler raises when it meets it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from galley.common.server.inflate import within
from galley.common.server.interceptors import Behavior, Handler, WrappingInterceptor, wrap_handler
from galley.core.errors import InvalidField

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# That are looked at to say what is wrong with a message: some milliseconds.
_MAX_FIELDS = 4096


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands where a request message should be."""

    fault: InvalidField


class DeserializeInterceptor(WrappingInterceptor):
    """Bounds and reads requests; stands inside StatusInterceptor."""

    for_all = True

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Replace the deserializer, and have the method raise what it could not read."""
        return wrap_handler(
            handler,
            unary=_refuse_unary,
            stream=_refuse_stream,
            deserializer=self._reader(_input_type(method)),
        )

    def _reader(self, kind: Descriptor) -> Callable[[bytes], Any]:
        parse = GetMessageClass(kind).FromString

        def read(data: bytes) -> Any:
            try:
                plain = within(data, self._max_message_bytes)
            except ValueError as problem:
                return Unreadable(InvalidField(kind.name, str(problem)))
            try:
                return parse(plain)
            except DecodeError:
                return Unreadable(explain(plain, kind))

        return read


def explain(data: bytes, kind: Descriptor) -> InvalidField:
    """Why `data` does not parse as a message of this `kind`; of one of very many fields, only that."""
    try:
        field = next(_Walk().bad_strings(memoryview(data), kind, ""), None)
    except (ValueError, IndexError, RecursionError):
        field = None
    if field is None:
        return InvalidField(kind.name, "is not a well-formed message of this type")
    return InvalidField(field, "must be valid UTF-8")


def _input_type(method: str) -> Descriptor:
    service, _, name = method.lstrip("/").partition("/")
    found: Descriptor = descriptor_pool.Default().FindMethodByName(f"{service}.{name}").input_type
    return found


def _refuse_unary(behavior: Behavior) -> Behavior:
    async def checked(request: object, context: object) -> Any:
        return await behavior(_readable(request), context)

    return checked


def _refuse_stream(behavior: Behavior) -> Behavior:
    async def checked(request: object, context: object) -> AsyncIterator[Any]:
        async with aclosing(behavior(_readable(request), context)) as responses:
            async for response in responses:
                yield response

    return checked


def _readable(request: Any) -> Any:
    """A message as it is, or raises; a stream of messages becomes one that raises at the unreadable one."""
    if isinstance(request, Unreadable):
        raise request.fault
    return _each_readable(request) if hasattr(request, "__aiter__") else request


async def _each_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


class _Walk:
    """Through the fields of a message that does not parse, for so long as other calls can wait for it."""

    def __init__(self) -> None:
        self._left = _MAX_FIELDS

    def bad_strings(self, data: memoryview, kind: Descriptor, path: str) -> Iterator[str]:
        """The paths of the string fields that are not UTF-8, in wire order; ValueError if malformed."""
        seen: dict[int, int] = {}
        for number, value in _fields(data):
            self._left -= 1
            if self._left < 0:
                raise ValueError("too many fields to look through")
            field = kind.fields_by_number.get(number)
            if field is None or value is None:
                continue
            index = seen[number] = seen.get(number, -1) + 1
            is_map = field.message_type and field.message_type.GetOptions().map_entry
            name = path + field.name + (f"[{index}]" if field.is_repeated and not is_map else "")
            if field.message_type is not None:
                yield from self.bad_strings(value, field.message_type, name + ".")
            elif field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(value):
                yield name


def _is_utf8(value: memoryview) -> bool:
    try:
        str(value, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | None]]:
    """Each field's number, with its bytes if it is length-delimited."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        value = None
        if wire_type == _VARINT:
            _, at = _varint(data, at)
        elif wire_type in {_FIXED64, _FIXED32}:
            at += 8 if wire_type == _FIXED64 else 4
        elif wire_type == _BYTES:
            size, at = _varint(data, at)
            value = data[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {wire_type}")
        if at > len(data):
            raise ValueError("cut short")
        yield number, value


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")

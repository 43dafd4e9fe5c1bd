"""Bound, decompress and parse requests; a bad request is INVALID_ARGUMENT.

grpc.aio answers INTERNAL when a deserializer raises. Here a message that cannot be read becomes an
`Unreadable`, and the handler raises when it receives one.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from galley.common.wire.handlers import Behavior, Handler, WrappingInterceptor, wrap_handler
from galley.core.errors import InvalidField

# No protobuf message begins so: its first byte would be a field of wire type 7.
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 16 + zlib.MAX_WBITS


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Take the place of a request message that cannot be read."""

    error: InvalidField


class DeserializeInterceptor(WrappingInterceptor):
    """Parse requests of at most `max_message_bytes`; place it inside StatusInterceptor."""

    includes_standard = True

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Replace the deserializer, and raise in the method what it could not read."""
        return wrap_handler(
            handler,
            unary=_check_unary,
            stream=_check_stream,
            deserializer=self._deserializer(_input_type(method)),
        )

    def _deserializer(self, message_type: Descriptor) -> Callable[[bytes], Any]:
        parse = GetMessageClass(message_type).FromString

        def deserialize(data: bytes) -> Any:
            try:
                return parse(decompress(data, self._max_message_bytes))
            except DecodeError:
                problem = f"must be a well-formed {message_type.name} message (its strings in UTF-8)"
            except ValueError as error:
                problem = str(error)
            return Unreadable(InvalidField(message_type.name, problem))

        return deserialize


def decompress(data: bytes, max_bytes: int) -> bytes:
    """Return the message: `data` itself, or its content if it is gzip. Raises ValueError with the problem.

    No more than `max_bytes` + 1 bytes are inflated.
    """
    if len(data) > max_bytes:
        raise ValueError(f"must be at most {max_bytes} bytes, got {len(data)}")
    if not data.startswith(_GZIP_MAGIC):
        return data
    inflater = zlib.decompressobj(_GZIP_WBITS)
    try:
        content = inflater.decompress(data, max_bytes + 1)
    except zlib.error:
        raise ValueError("must be well-formed gzip") from None
    if len(content) > max_bytes:
        raise ValueError(f"must be at most {max_bytes} bytes, got more when inflated")
    if not inflater.eof or inflater.unused_data:
        raise ValueError("must be well-formed gzip")
    return content


def _input_type(method: str) -> Descriptor:
    service, _, name = method.lstrip("/").partition("/")
    input_type: Descriptor = descriptor_pool.Default().FindMethodByName(f"{service}.{name}").input_type
    return input_type


def _check_unary(behavior: Behavior) -> Behavior:
    async def checked(request: object, context: object) -> Any:
        return await behavior(_readable(request), context)

    return checked


def _check_stream(behavior: Behavior) -> Behavior:
    async def checked(request: object, context: object) -> AsyncIterator[Any]:
        async with aclosing(behavior(_readable(request), context)) as responses:
            async for response in responses:
                yield response

    return checked


def _readable(request: Any) -> Any:
    """Return the message, or raise its error; a stream of messages raises at the unreadable one."""
    if isinstance(request, Unreadable):
        raise request.error
    return _each_readable(request) if hasattr(request, "__aiter__") else request


async def _each_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)

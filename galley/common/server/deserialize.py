"""Read requests: in time, bounded, decompressed and parsed; a bad request is INVALID_ARGUMENT.

grpc.aio responds with INTERNAL when a deserializer raises. Here a message that cannot be read becomes an
`InvalidField`, and the handler raises it when it receives it.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from galley.common.wire.handlers import Behavior, Context, Handler, WrappingInterceptor, behavior_of
from galley.core.errors import DeadlinePassed, InvalidField

# No protobuf message begins so: its first byte would be a field of wire type 7.
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 16 + zlib.MAX_WBITS
_REFLECTION = "/grpc.reflection."
# A reflection call is short; a health watch may last as long as its client.
_REFLECTION_TIMEOUT_S = 60.0


class RequestInterceptor(WrappingInterceptor):
    """An interceptor that reads a request within `timeout_s` and refuses messages over `max_message_bytes`.

    gRPC would wait for a request as long as the connection lives. Place this inside StatusInterceptor and
    the interceptors that refuse callers, whose requests are then never read. Calls that stream requests may
    be silent for any time, except those of reflection.
    """

    includes_standard = True

    def __init__(self, timeout_s: float, max_message_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._max_message_bytes = max_message_bytes

    def wrap(self, handler: Handler, method: str) -> Handler:
        behavior, write = behavior_of(handler), handler.response_serializer
        read = self._deserializer(method)
        if handler.request_streaming:
            checked = _check_each(behavior, _REFLECTION_TIMEOUT_S if method.startswith(_REFLECTION) else None)
        elif handler.response_streaming:
            checked = self._stream(behavior)
        else:
            checked = self._unary(behavior)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(checked, read, write)
        return grpc.stream_unary_rpc_method_handler(checked, read, write)

    def _deserializer(self, method: str) -> Callable[[bytes], Any]:
        service, _, name = method.lstrip("/").partition("/")
        message_type = descriptor_pool.Default().FindMethodByName(f"{service}.{name}").input_type
        parse = GetMessageClass(message_type).FromString

        def deserialize(data: bytes) -> Any:
            try:
                return parse(decompress(data, self._max_message_bytes))
            except DecodeError:
                problem = f"must be a well-formed {message_type.name} message (its strings in UTF-8)"
            except ValueError as error:
                problem = str(error)
            return InvalidField(message_type.name, problem)

        return deserialize

    def _unary(self, behavior: Behavior) -> Behavior:
        async def call(_: object, context: Context) -> Any:
            return await behavior(await self._request(context), context)

        return call

    def _stream(self, behavior: Behavior) -> Behavior:
        async def call(_: object, context: Context) -> AsyncIterator[Any]:
            request = await self._request(context)
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return call

    async def _request(self, context: Context) -> Any:
        """Return a call's request. Raise DeadlinePassed if it is late, InvalidField if bad or missing."""
        try:
            async with asyncio.timeout(self._timeout_s):
                request = await context.read()
        except TimeoutError:
            raise DeadlinePassed(f"the request did not arrive within {self._timeout_s:g} s") from None
        if request is grpc.aio.EOF:
            raise InvalidField("request", "must be one message, got none")
        return _readable(request)


def _check_each(behavior: Behavior, timeout_s: float | None) -> Behavior:
    def call(requests: AsyncIterator[Any], context: Context) -> Any:
        return behavior(
            _each_readable(requests if timeout_s is None else _until(requests, timeout_s)), context
        )

    return call


async def _each_readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


async def _until(requests: AsyncIterator[Any], timeout_s: float) -> AsyncIterator[Any]:
    """Yield the requests. Raise DeadlinePassed once `timeout_s` is over."""
    end_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            async with asyncio.timeout_at(end_s):
                request = await anext(requests)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise DeadlinePassed(f"a call of reflection must end within {timeout_s:g} s") from None
        yield request


def _readable(request: Any) -> Any:
    if isinstance(request, InvalidField):
        raise request
    return request


def decompress(data: bytes, max_bytes: int) -> bytes:
    """Return `data`, or its content if it is gzip, after inflating at most `max_bytes` + 1 bytes.

    Raise ValueError if either is larger than `max_bytes`, or the gzip is broken or not one complete member.
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
        raise ValueError("must be one complete gzip member, got a truncated one or data after its end")
    return content

"""Read requests: in time, bounded, decompressed and parsed; a bad request is INVALID_ARGUMENT.

grpc.aio would respond with INTERNAL when its deserializer raises, and gives it one turn of the event loop for
any message. So handlers get bytes from it, and parse them here.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from galley.common.config.settings import ServerLimits
from galley.common.wire.fields import SMALL_BYTES, check_fields
from galley.common.wire.handlers import Behavior, Context, Handler, WrappingInterceptor, behavior_of
from galley.core.errors import DeadlinePassed, InvalidField

# No protobuf message begins so: its first byte would be a field of wire type 7.
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 16 + zlib.MAX_WBITS
_PIECE_BYTES = 256 * 1024
"""What is inflated before others get a turn: about 1 ms."""
_REFLECTION = "/grpc.reflection."
# A reflection call is short; a health watch may last as long as its client.
_REFLECTION_TIMEOUT_S = 60.0

Parse: TypeAlias = Callable[[bytes], Awaitable[Any]]


class RequestInterceptor(WrappingInterceptor):
    """An interceptor that reads a request in time and refuses messages beyond the limits.

    gRPC would wait for a request as long as the connection lives. Place this inside StatusInterceptor and
    the interceptors that refuse callers, whose requests are then never read. Calls that stream requests may
    be silent for any time, except those of reflection.
    """

    includes_standard = True

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits

    def wrap(self, handler: Handler, method: str) -> Handler:
        behavior, write = behavior_of(handler), handler.response_serializer
        parse = self._parse_of(method)
        if handler.request_streaming:
            timeout_s = _REFLECTION_TIMEOUT_S if method.startswith(_REFLECTION) else None
            checked = _parse_each(behavior, parse, timeout_s)
        elif handler.response_streaming:
            checked = self._stream(behavior, parse)
        else:
            checked = self._unary(behavior, parse)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(checked, None, write)
        return grpc.stream_unary_rpc_method_handler(checked, None, write)

    def _parse_of(self, method: str) -> Parse:
        service, _, name = method.lstrip("/").partition("/")
        message_type = descriptor_pool.Default().FindMethodByName(f"{service}.{name}").input_type
        message_class = GetMessageClass(message_type)
        limits = self._limits

        async def parse(data: bytes) -> Any:
            """Return the message in `data`, in slices as far as they are long. Raise InvalidField."""
            try:
                content = await decompress(data, limits.max_message_bytes)
                is_long = len(content) > SMALL_BYTES
                if is_long and limits.max_message_fields:
                    await check_fields(
                        content, message_type, limits.max_message_fields, limits.max_numbers_bytes
                    )
                message = message_class.FromString(content)
            except DecodeError:
                problem = f"must be a well-formed {message_type.name} message (its strings in UTF-8)"
            except ValueError as error:
                problem = str(error)
            else:
                if is_long:
                    await asyncio.sleep(0)  # what is done with it is a step of its own
                return message
            raise InvalidField(message_type.name, problem)

        return parse

    def _unary(self, behavior: Behavior, parse: Parse) -> Behavior:
        async def call(_: object, context: Context) -> Any:
            return await behavior(await parse(await self._request(context)), context)

        return call

    def _stream(self, behavior: Behavior, parse: Parse) -> Behavior:
        async def call(_: object, context: Context) -> AsyncIterator[Any]:
            request = await parse(await self._request(context))
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return call

    async def _request(self, context: Context) -> bytes:
        """Return a call's request. Raise DeadlinePassed if it is late, InvalidField if it is missing."""
        timeout_s = self._limits.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                request = await context.read()
        except TimeoutError:
            raise DeadlinePassed(f"the request did not arrive within {timeout_s:g} s") from None
        if request is grpc.aio.EOF:
            raise InvalidField("request", "must be one message, got none")
        return bytes(request)


def _parse_each(behavior: Behavior, parse: Parse, timeout_s: float | None) -> Behavior:
    def call(requests: AsyncIterator[bytes], context: Context) -> Any:
        return behavior(
            _parsed(requests if timeout_s is None else _until(requests, timeout_s), parse), context
        )

    return call


async def _parsed(requests: AsyncIterator[bytes], parse: Parse) -> AsyncIterator[Any]:
    async for request in requests:
        yield await parse(request)


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


async def decompress(data: bytes, max_bytes: int) -> bytes:
    """Return `data`, or its content if it is gzip, after inflating at most `max_bytes` + 1 bytes.

    Raise ValueError if either is larger than `max_bytes`, or the gzip is broken or not one complete member.
    """
    if len(data) > max_bytes:
        raise ValueError(f"must be at most {max_bytes} bytes, got {len(data)}")
    if not data.startswith(_GZIP_MAGIC):
        return data
    inflater = zlib.decompressobj(_GZIP_WBITS)
    content = bytearray()
    for at in range(0, len(data), _PIECE_BYTES):
        piece = data[at : at + _PIECE_BYTES]
        while piece and not inflater.eof:
            try:
                content += inflater.decompress(piece, min(_PIECE_BYTES, max_bytes + 1 - len(content)))
            except zlib.error:
                raise ValueError("must be well-formed gzip") from None
            if len(content) > max_bytes:
                raise ValueError(f"must be at most {max_bytes} bytes, got more when inflated")
            if piece := inflater.unconsumed_tail:
                await asyncio.sleep(0)
        if inflater.eof:
            break
    if not inflater.eof or inflater.unused_data or at + _PIECE_BYTES < len(data):
        raise ValueError("must be one complete gzip member, got a truncated one or data after its end")
    return bytes(content)

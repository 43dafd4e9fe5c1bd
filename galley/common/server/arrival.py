"""A call whose request does not come is ended: gRPC would wait for it as long as the connection lives.

It stands behind those that refuse strangers, whose requests are therefore never read; gRPC would read each
of them, as large as it may be, before it asks anybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

from galley.common.server.interceptors import Behavior, Handler
from galley.core.errors import DeadlinePassed, InvalidField


class ArrivalInterceptor(grpc.aio.ServerInterceptor):
    """Of calls with one request, health's too. Those that stream requests may be silent for long."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Have the handler read its request by itself, where gRPC would have read it for it."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        read, write = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            streamed: Any = handler.unary_stream
            return grpc.stream_stream_rpc_method_handler(self._stream(streamed), read, write)
        told: Any = handler.unary_unary
        return grpc.stream_unary_rpc_method_handler(self._unary(told), read, write)

    def _unary(self, behavior: Behavior) -> Behavior:
        async def arrived(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            return await behavior(await self._request(context), context)

        return arrived

    def _stream(self, behavior: Behavior) -> Behavior:
        async def arrived(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            request = await self._request(context)
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return arrived

    async def _request(self, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Raises DeadlinePassed or InvalidField if there is none."""
        try:
            async with asyncio.timeout(self._within_s):
                request = await context.read()
        except TimeoutError:
            raise DeadlinePassed(f"the request did not come within {self._within_s:g} s") from None
        if request is grpc.aio.EOF:
            raise InvalidField("request", "must be one message, is none")
        return request

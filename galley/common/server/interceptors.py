"""Wrapping gRPC method handlers, whatever their kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# A servicer's method: a coroutine function, or an async generator function if it answers a stream.
Behavior: TypeAlias = Callable[..., Any]


class WrappingInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the methods of every service, of the standard ones (health, reflection) if it is `for_all`."""

    for_all = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Find the method's handler and wrap it; a method that is not served stays so."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or (method.startswith("/grpc.") and not self.for_all):
            return handler
        return self.wrap(handler, method)

    def wrap(self, handler: Handler, method: str) -> Handler:
        """The handler that serves `method` (/package.Service/Name) instead of `handler`."""
        raise NotImplementedError


def wrap_handler(
    handler: Handler,
    *,
    unary: Callable[[Behavior], Behavior],
    stream: Callable[[Behavior], Behavior],
    deserializer: Callable[[bytes], Any] | None = None,
) -> Handler:
    """A handler that behaves as `handler` wrapped by `unary` or `stream`, by the kind of its *response*."""
    read = deserializer or handler.request_deserializer
    write = handler.response_serializer
    behavior: Any = (
        handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
    )
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(stream(behavior), read, write)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(unary(behavior), read, write)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream(behavior), read, write)
    return grpc.unary_unary_rpc_method_handler(unary(behavior), read, write)

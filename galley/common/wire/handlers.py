"""Wrap gRPC method handlers of any kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Protocol, TypeAlias, cast

import grpc

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# A servicer's method: a coroutine function, or an async generator function if it streams responses.
Behavior: TypeAlias = Callable[..., Any]


class HasMetadata(Protocol):
    def invocation_metadata(self) -> Any:
        """Return pairs of a lower-case name and a value, or None if there are none."""


class WrappingInterceptor(grpc.aio.ServerInterceptor):
    """An interceptor of all methods; it skips health and reflection unless `includes_standard` is set."""

    includes_standard = False

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or (method.startswith("/grpc.") and not self.includes_standard):
            return handler
        return self.wrap(handler, method)

    def wrap(self, handler: Handler, method: str) -> Handler:
        """Return the handler that serves `method` (/package.Service/Name) instead of `handler`."""
        raise NotImplementedError


def text_metadata(call: HasMetadata) -> dict[str, str]:
    """Return the text metadata of a call by lower-case name; the last value of a name counts."""
    return {name: value for name, value in call.invocation_metadata() or () if isinstance(value, str)}


def repeated_names(call: HasMetadata) -> frozenset[str]:
    """Return the lower-case names that the metadata of a call has more than once."""
    counts = Counter(name for name, _ in call.invocation_metadata() or ())
    return frozenset(name for name, count in counts.items() if count > 1)


def behavior_of(handler: Handler) -> Behavior:
    return cast(
        "Behavior",
        handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary,
    )


def wrap_handler(
    handler: Handler, *, unary: Callable[[Behavior], Behavior], stream: Callable[[Behavior], Behavior]
) -> Handler:
    """Wrap the method by `unary` or `stream`, depending on the kind of its *response*."""
    behavior, read, write = behavior_of(handler), handler.request_deserializer, handler.response_serializer
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(stream(behavior), read, write)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(unary(behavior), read, write)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(stream(behavior), read, write)
    return grpc.unary_unary_rpc_method_handler(unary(behavior), read, write)


def run_within(handler: Handler, around: Callable[[Context], AbstractAsyncContextManager[None]]) -> Handler:
    """Run the method within what `around` returns for the context of its call."""

    def unary(behavior: Behavior) -> Behavior:
        async def call(request: object, context: Context) -> Any:
            async with around(context):
                return await behavior(request, context)

        return call

    def stream(behavior: Behavior) -> Behavior:
        async def call(request: object, context: Context) -> AsyncIterator[Any]:
            async with around(context), aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return call

    return wrap_handler(handler, unary=unary, stream=stream)

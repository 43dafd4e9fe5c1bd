"""Turn errors of a servicer into statuses, and bound the wait for a call's request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from galley.common.logs import get_logger, log_internal
from galley.common.wire.handlers import Behavior, Handler, WrappingInterceptor, wrap_handler
from galley.common.wire.status import abort
from galley.core.errors import DeadlinePassed, GalleyError, InvalidField

_LOG = get_logger(__name__)

# Raised by a servicer's own abort, and where a response cannot be sent because the caller has gone.
_GRPC_ERRORS = (grpc.aio.AbortError, grpc.aio.InternalError)


class StatusInterceptor(WrappingInterceptor):
    """Turn what a servicer raises into its status; cancellation and gRPC's own errors pass."""

    includes_standard = True

    def wrap(self, handler: Handler, method: str) -> Handler:  # noqa: ARG002  # the same for all
        """Return the handler with its method guarded."""
        return wrap_handler(handler, unary=_guard_unary, stream=_guard_stream)


def _guard_unary(behavior: Behavior) -> Behavior:
    async def guarded(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behavior(request, context)
        except _GRPC_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001  # the outermost guard of a call
            return await _fail(context, error)

    return guarded


def _guard_stream(behavior: Behavior) -> Behavior:
    async def guarded(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response
        except _GRPC_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001  # the outermost guard of a call
            await _fail(context, error)

    return guarded


async def _fail(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    log_internal(error)
    if isinstance(error, GalleyError) and error.public_message != str(error):
        _LOG.warning("call failed", error=str(error))
    await abort(context, error)


class RequestTimeoutInterceptor(grpc.aio.ServerInterceptor):
    """End a call with one request if the request does not arrive in time.

    gRPC would wait for it as long as the connection lives. Place it behind the interceptors that refuse
    callers: it reads the request itself, so requests of refused callers are never read. Calls that stream
    requests may be silent for any time.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return a handler that reads its request itself."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        read, write = handler.request_deserializer, handler.response_serializer
        if handler.response_streaming:
            stream: Any = handler.unary_stream
            return grpc.stream_stream_rpc_method_handler(self._stream(stream), read, write)
        unary: Any = handler.unary_unary
        return grpc.stream_unary_rpc_method_handler(self._unary(unary), read, write)

    def _unary(self, behavior: Behavior) -> Behavior:
        async def call(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            return await behavior(await self._request(context), context)

        return call

    def _stream(self, behavior: Behavior) -> Behavior:
        async def call(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            request = await self._request(context)
            async with aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response

        return call

    async def _request(self, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Return the request. Raises DeadlinePassed or InvalidField if there is none."""
        try:
            async with asyncio.timeout(self._timeout_s):
                request = await context.read()
        except TimeoutError:
            raise DeadlinePassed(f"the request did not arrive within {self._timeout_s:g} s") from None
        if request is grpc.aio.EOF:
            raise InvalidField("request", "must be one message, got none")
        return request

"""Serve health and bound the standard calls, health and reflection, which are open to every caller."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2

from galley.common.wire.handlers import Behavior, Handler, wrap_handler
from galley.common.wire.status import abort
from galley.core.errors import DeadlinePassed, GalleyError, Overloaded

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_PREFIX = "/grpc."
MAX_OPEN_CALLS = 128
"""Calls of one standard method that may be open at once."""
_RETRY_AFTER_S = 1.0
_REFLECTION = "/grpc.reflection."
# A reflection tool asks and leaves; health may be watched as long as a client lives.
_REFLECTION_TIMEOUT_S = 60.0


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # ships no types
    """Serve grpc.health.v1, with a watch that cannot hold up a change of status.

    The library writes to a watcher while it holds the lock that `set` needs, so one watcher that does not
    read would keep a server from reporting that it stops. Here the library writes to a queue.
    """

    async def List(self, _request: Any, _context: Context) -> Any:  # noqa: N802  # the name of the RPC
        """Return the status of every service."""
        statuses = {
            name: health_pb2.HealthCheckResponse(status=status)
            for name, status in self._server_status.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802  # the name of the RPC
        self, request: Any, _context: Context
    ) -> AsyncIterator[Any]:
        """Yield the status of a service, and each later one."""
        statuses = _StatusQueue()
        watching = asyncio.create_task(super().Watch(request, statuses))
        try:
            while True:
                yield await statuses.get()
        finally:
            watching.cancel()
            await asyncio.wait({watching})


class _StatusQueue(asyncio.Queue[Any]):
    """Stand for the context of a watch; a server changes its status a few times only."""

    async def write(self, response: Any) -> None:
        """Keep the response, without waiting for the watcher."""
        self.put_nowait(response)


class StandardCallsInterceptor(grpc.aio.ServerInterceptor):
    """Bound the open calls of each standard method, and the duration of reflection."""

    def __init__(self, max_open: int = MAX_OPEN_CALLS) -> None:
        self._max_open = max_open
        self._open: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler if the method is a standard one."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_PREFIX):
            return handler
        return wrap_handler(handler, unary=partial(self._unary, method), stream=partial(self._stream, method))

    def _unary(self, method: str, behavior: Behavior) -> Behavior:
        async def bounded(request: object, context: Context) -> Any:
            try:
                with self._counted(method):
                    return await behavior(request, context)
            except GalleyError as error:
                await abort(context, error)

        return bounded

    def _stream(self, method: str, behavior: Behavior) -> Behavior:
        async def bounded(request: Any, context: Context) -> AsyncIterator[Any]:
            requests = _until_timeout(request) if method.startswith(_REFLECTION) else request
            try:
                with self._counted(method):
                    async with aclosing(behavior(requests, context)) as responses:
                        async for response in responses:
                            yield response
            except GalleyError as error:
                await abort(context, error)

        return bounded

    @contextmanager
    def _counted(self, method: str) -> Iterator[None]:
        if self._open[method] >= self._max_open:
            raise Overloaded(f"{method}: {self._max_open} calls are open", _RETRY_AFTER_S)
        self._open[method] += 1
        try:
            yield
        finally:
            self._open[method] -= 1


async def _until_timeout(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield the requests that arrive in time. Raises DeadlinePassed."""
    end_s = asyncio.get_running_loop().time() + _REFLECTION_TIMEOUT_S
    while True:
        try:
            async with asyncio.timeout_at(end_s):
                request = await anext(requests)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise DeadlinePassed(f"reflection calls end after {_REFLECTION_TIMEOUT_S:g} s") from None
        yield request

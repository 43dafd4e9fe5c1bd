"""What every server serves besides its own: health and reflection, open to all, and bounded for that.

gRPC's own health service writes to whoever watches while it holds the lock that a change of status needs: one
watcher that does not read would keep a server from saying that it stops. This one holds none.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from galley.common.server.interceptors import Behavior, Handler, wrap_handler
from galley.common.wire.status import abort
from galley.core.errors import DeadlinePassed, GalleyError, Overloaded

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# A ServingStatus.
Status: TypeAlias = int

_PREFIX = "/grpc."
MOST_OPEN = 128
"""Calls of one standard method at once."""
_RETRY_AFTER_S = 1.0
_REFLECTION = "/grpc.reflection."
# A tool asks its questions and goes; health is watched for as long as a client lives.
_LONGEST_REFLECTION_S = 60.0


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # ships no types
    """grpc.health.v1 for the services that were `set`."""

    def __init__(self) -> None:
        self._statuses: dict[str, Status] = {}
        self._changed = asyncio.Event()
        self._stopping = False

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802  # the name of the RPC
        """The status of a service; NOT_FOUND for one that is not known."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, _request: Any, _context: Context) -> Any:  # noqa: N802  # the name of the RPC
        """Of all services."""
        statuses = {
            name: health_pb2.HealthCheckResponse(status=status) for name, status in self._statuses.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802  # the name of the RPC
        self, request: Any, _context: Context
    ) -> AsyncIterator[Any]:
        """The status of a service, and each other that it comes to have while it is read."""
        told: Status | None = None
        while True:
            changed = self._changed
            unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            status = self._statuses.get(request.service, unknown)
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            else:
                await changed.wait()

    async def set(self, service: str, status: Status) -> None:
        """From now on; nothing after `enter_graceful_shutdown`."""
        if not self._stopping:
            self._statuses[service] = status
            self._tell()

    async def enter_graceful_shutdown(self) -> None:
        """Nothing serves any more."""
        self._stopping = True
        self._statuses = dict.fromkeys(self._statuses, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class StandardCallsInterceptor(grpc.aio.ServerInterceptor):
    """So many calls of each standard method at once; reflection's last a minute at most."""

    def __init__(self, most_open: int = MOST_OPEN) -> None:
        self._most_open = most_open
        self._open: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Bound it, if it is one of these."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_PREFIX):
            return handler
        return wrap_handler(handler, unary=partial(self._unary, method), stream=partial(self._stream, method))

    def _unary(self, method: str, behavior: Behavior) -> Behavior:
        async def bounded(request: object, context: Context) -> Any:
            try:
                with self._place(method):
                    return await behavior(request, context)
            except GalleyError as error:
                await abort(context, error)

        return bounded

    def _stream(self, method: str, behavior: Behavior) -> Behavior:
        async def bounded(request: Any, context: Context) -> AsyncIterator[Any]:
            asked = _for_a_while(request) if method.startswith(_REFLECTION) else request
            try:
                with self._place(method):
                    async with aclosing(behavior(asked, context)) as responses:
                        async for response in responses:
                            yield response
            except GalleyError as error:
                await abort(context, error)

        return bounded

    @contextmanager
    def _place(self, method: str) -> Iterator[None]:
        if self._open[method] >= self._most_open:
            raise Overloaded(f"{self._most_open} calls of {method} are open", _RETRY_AFTER_S)
        self._open[method] += 1
        try:
            yield
        finally:
            self._open[method] -= 1


async def _for_a_while(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Those that come in time. Raises DeadlinePassed."""
    end_s = asyncio.get_running_loop().time() + _LONGEST_REFLECTION_S
    while True:
        try:
            async with asyncio.timeout_at(end_s):
                request = await anext(requests)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise DeadlinePassed(f"reflection ends after {_LONGEST_REFLECTION_S:g} s") from None
        yield request

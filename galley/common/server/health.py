"""Serve health, on the service's port and on a second one without TLS for kubelet's gRPC probes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from galley.common.config.settings import ServerLimits
from galley.common.server.deserialize import RequestInterceptor
from galley.common.server.interceptors import StatusInterceptor
from galley.common.server.listen import bind
from galley.common.wire.handlers import Context

MAX_CONNECTIONS = 256
_MAX_MESSAGE_BYTES = 4096
# A request is a few bytes and gets its response at once; idle connections are closed.
_OPTIONS = (
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.so_reuseport", 0),  # another process that got the port by accident would get a part of the calls
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 4096),
    ("grpc.absolute_max_metadata_size", 4096),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
)


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # ships no types
    """A servicer of grpc.health.v1, with a watch that cannot hold up a change of status.

    The library writes to a watcher while it holds the lock that `set` needs, so one watcher that does not
    read would keep a server from reporting that it stops. Here the library writes to a queue.
    """

    async def List(self, _request: Any, _context: Context) -> Any:  # noqa: N802  # the name of the RPC
        statuses = {
            name: health_pb2.HealthCheckResponse(status=status)
            for name, status in self._server_status.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802  # the name of the RPC
        self, request: Any, _context: Context
    ) -> AsyncIterator[Any]:
        statuses = _StatusQueue()
        watching = asyncio.create_task(super().Watch(request, statuses))
        try:
            while True:
                yield await statuses.get()
        finally:
            watching.cancel()
            await asyncio.wait({watching})


class _StatusQueue(asyncio.Queue[Any]):
    """A queue in place of the context of a watch, unbounded because a status changes only a few times."""

    async def write(self, response: Any) -> None:
        self.put_nowait(response)


async def serve_health_only(
    host: str, port: int, servicer: HealthServicer, request_timeout_s: float
) -> tuple[grpc.aio.Server, str]:
    """Serve the statuses of `servicer` on `port`; return the server and its address. Raise CannotBind.

    Only `Check` is served: `Watch`, which the protocol leaves to servers, would let every caller that reaches
    the port keep streams open.
    """
    limits = ServerLimits(max_message_bytes=_MAX_MESSAGE_BYTES, request_timeout_s=request_timeout_s)
    server = grpc.aio.server(
        interceptors=[StatusInterceptor(), RequestInterceptor(limits)],
        options=_OPTIONS,
    )
    check = grpc.unary_unary_rpc_method_handler(
        servicer.Check,
        request_deserializer=health_pb2.HealthCheckRequest.FromString,
        response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check}),)
    )
    address = bind(server.add_insecure_port, host, port)
    await server.start()
    return server, address

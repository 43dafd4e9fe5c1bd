"""Serve health, and nothing else, on a second port without TLS, for kubelet's gRPC probes.

Only `Check` is served: `Watch`, which the protocol leaves to servers, would let every caller that reaches the
port keep streams open. Requests must arrive in time and connections are few; kubelet opens one a probe.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2

from galley.common.server.deserialize import DeserializeInterceptor
from galley.common.server.health import HealthServicer
from galley.common.server.interceptors import RequestTimeoutInterceptor, StatusInterceptor
from galley.common.server.listen import bind

MAX_CONNECTIONS = 256
_MAX_MESSAGE_BYTES = 4096
# A request is a few bytes and answered at once; idle connections are closed.
_OPTIONS = (
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 4096),
    ("grpc.absolute_max_metadata_size", 4096),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
)


@dataclass(frozen=True)
class HealthPort:
    """Serve at `address` (host:port; empty: nowhere) until `stop`."""

    address: str = ""
    _server: grpc.aio.Server | None = None

    async def stop(self) -> None:
        """Stop serving."""
        if self._server is not None:
            await self._server.stop(None)


async def open_health_port(
    host: str, port: int, servicer: HealthServicer, request_timeout_s: float
) -> HealthPort:
    """Serve the statuses of `servicer` on `port`; -1 serves nowhere. Raises CannotBind."""
    if port < 0:
        return HealthPort()
    server = grpc.aio.server(
        interceptors=[
            StatusInterceptor(),
            RequestTimeoutInterceptor(request_timeout_s),
            DeserializeInterceptor(_MAX_MESSAGE_BYTES),
        ],
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
    address = bind(server, host, port)
    await server.start()
    return HealthPort(address, server)

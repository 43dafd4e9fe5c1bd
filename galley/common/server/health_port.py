"""A second port that tells health and nothing else, without TLS: kubelet's gRPC probes know none.

Only `Check` is served. `Watch`, which the protocol leaves to servers, would keep streams open for whoever can
reach a port that asks nobody who he is. Nor is a question waited for that does not come, and connections are
few: kubelet makes one for each of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2

from galley.common.server.arrival import ArrivalInterceptor
from galley.common.server.deserialize import DeserializeInterceptor
from galley.common.server.health import Health
from galley.common.server.listen import bind
from galley.common.wire.status import StatusInterceptor

MAX_CONNECTIONS = 256
_MAX_MESSAGE_BYTES = 4096
# A question is a few bytes, and answered at once; connections that ask nothing are closed.
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
    """Serves at `address` (host:port; empty: nowhere) from `open_health_port` to `stop`."""

    address: str = ""
    _server: grpc.aio.Server | None = None

    async def stop(self) -> None:
        """Answer nobody any more."""
        if self._server is not None:
            await self._server.stop(None)


async def open_health_port(host: str, port: int, told: Health, request_timeout_s: float) -> HealthPort:
    """Tell there what `told` knows; port -1: nowhere. Raises CannotBind."""
    if port < 0:
        return HealthPort()
    server = grpc.aio.server(
        interceptors=[
            StatusInterceptor(),
            ArrivalInterceptor(request_timeout_s),
            DeserializeInterceptor(_MAX_MESSAGE_BYTES),
        ],
        options=_OPTIONS,
    )
    check = grpc.unary_unary_rpc_method_handler(
        told.Check,
        request_deserializer=health_pb2.HealthCheckRequest.FromString,
        response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check}),)
    )
    address = bind(server, host, port)
    await server.start()
    return HealthPort(address, server)

"""What a server lets its peers have: messages, headers, calls, connections, time. gRPC itself enforces it.

Nothing here ends a call that is being served: a connection that is told to go, for its age or for a drain,
goes once its calls have ended.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings

from galley.common.tls.keepalive import KEEPALIVE

_WEEK_S = 7 * 24 * 3600.0
# grpc refuses larger messages by itself and says RESOURCE_EXHAUSTED; up to here we name field and bound.
_HARD_LIMIT_FACTOR = 2
_IDENTITY, _GZIP = 0, 2
# A process that was stopped or starved reads at once what came over seconds: no reason to go.
_SPARE_PINGS = 100


def connection_idle(default_s: float) -> Any:
    """The field `max_connection_idle_s`, of services that differ by its default."""
    return Field(
        default=default_s,
        ge=0,
        le=_WEEK_S,
        description="A connection without calls for so long is closed; 0: never.",
    )


def connection_age(default_s: float) -> Any:
    """The field `max_connection_age_s`."""
    return Field(
        default=default_s,
        ge=0,
        le=_WEEK_S,
        description="A connection of this age takes no more calls, and closes when its last has ended: its "
        "client connects anew; 0: never.",
    )


class ServerLimits(BaseSettings):
    """The limits of a server, as settings."""

    max_message_bytes: int = Field(
        default=4 * 2**20, ge=1024, le=64 * 2**20, description="Largest request message accepted, in bytes."
    )
    max_metadata_bytes: int = Field(
        default=16 * 1024,
        ge=1024,
        le=2**20,
        description="Largest metadata of a call accepted: bytes of names and values, and 32 for each entry.",
    )
    max_concurrent_rpcs: int = Field(
        default=1000, ge=1, le=2**20, description="Calls open at once on one connection; more wait there."
    )
    max_connections: int = Field(
        default=4096, ge=1, le=2**20, description="Connections open at once; more are closed as they come."
    )
    max_connection_idle_s: float = connection_idle(0.0)
    max_connection_age_s: float = connection_age(0.0)
    min_ping_interval_s: float = Field(
        default=5.0,
        ge=0,
        le=_WEEK_S,
        description="A peer that pings more often than this while nothing else is sent is turned away.",
    )
    handshake_timeout_s: float = Field(
        default=10.0, gt=0, le=_WEEK_S, description="How long a new connection may take to become one."
    )
    request_timeout_s: float = Field(
        default=20.0,
        gt=0,
        le=_WEEK_S,
        description="How long the request of a call may take to come, once the call has begun.",
    )
    reflection: bool = Field(default=True, description="Tell whoever asks which calls are served.")


def server_options(limits: ServerLimits) -> list[tuple[str, int]]:
    """For `grpc.aio.server(options=)`."""
    return [
        # Two processes that share a port by accident would each get half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", _HARD_LIMIT_FACTOR * limits.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # gRPC would inflate whatever it is sent, 64 KiB to 64 MiB: it is done behind it (inflate.py).
        ("grpc.per_message_decompression", 0),
        ("grpc.compression_enabled_algorithms_bitset", 1 << _IDENTITY | 1 << _GZIP),
        # Between the two gRPC would refuse some calls and not others.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        ("grpc.max_concurrent_streams", limits.max_concurrent_rpcs),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server_handshake_timeout_ms", _milliseconds(limits.handshake_timeout_s)),
        *KEEPALIVE,
        # Peers ping as often as we do, also while nothing is called.
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(limits.min_ping_interval_s)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", _SPARE_PINGS),
        *_ages(limits),
    ]


def _ages(limits: ServerLimits) -> list[tuple[str, int]]:
    """No grace is set: without one gRPC waits for the calls of an old connection for ever."""
    told = {
        "grpc.max_connection_idle_ms": limits.max_connection_idle_s,
        "grpc.max_connection_age_ms": limits.max_connection_age_s,
    }
    return [(name, _milliseconds(seconds)) for name, seconds in told.items() if seconds]


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)

"""What a server lets its peers have: messages, headers, calls, connections, time. gRPC itself enforces it.

Nothing here ends a call that is being served: a connection that is told to go, for its age or for a drain,
goes once its calls have ended.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings

_WEEK_S = 7 * 24 * 3600.0


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

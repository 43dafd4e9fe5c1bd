"""Define what a server allows its peers: messages, headers, calls, connections, time. gRPC enforces it."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of one server; 0 s for idle time or age is no limit.

    - `max_message_bytes` bounds a request message.
    - `max_metadata_bytes` bounds the metadata of a call: names and values, and 32 bytes for each entry.
    - `max_concurrent_rpcs` calls may be open on one connection; more wait at the client.
    - `max_connections` may be open; later ones are closed at once.
    - A connection closes after `max_connection_idle_s` without calls. At `max_connection_age_s` it takes no
      more calls, and closes when its last call has ended.
    - `min_ping_interval_s`: a peer that pings more often while nothing else is sent is disconnected.
    - `handshake_timeout_s` bounds the set-up of a connection.
    - `request_timeout_s` bounds the wait for a request after its call has begun.
    """

    max_message_bytes: int = 4 * MIB
    max_metadata_bytes: int = 16 * 1024
    max_concurrent_rpcs: int = 1000
    max_connections: int = 4096
    max_connection_idle_s: float = 0.0
    max_connection_age_s: float = 0.0
    min_ping_interval_s: float = 5.0
    handshake_timeout_s: float = 10.0
    request_timeout_s: float = 20.0

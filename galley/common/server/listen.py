"""Bind servers to their addresses, with their TLS files and their limits."""

from __future__ import annotations

import math
from collections.abc import Callable

from galley.common.config.settings import ServerLimits, ServiceSettings
from galley.common.server.acceptors import ACCEPTORS
from galley.common.sockets import CannotBind, joined
from galley.common.tls.channels import KEEPALIVE, Material
from galley.common.tls.credentials import TlsFiles
from galley.common.tls.files import NamedFile, WatchedFiles

# gRPC refuses messages above this many times the limit; below, our own error names field and bound.
_HARD_LIMIT_FACTOR = 2
_IDENTITY, _GZIP = 0, 2
# A process that was stopped or starved reads at once the pings of several seconds.
_MAX_PING_STRIKES = 100


def bind(listen: Callable[[str], int], host: str, port: int) -> str:
    """Give a server its port; return host:port. The system chooses one for 0. Raise CannotBind."""
    address = joined(host, port)
    try:
        return joined(host, listen(address))
    except RuntimeError as error:
        raise CannotBind(f"cannot listen on {address}; is it in use?") from error


def server_files(settings: ServiceSettings) -> WatchedFiles[Material] | None:
    """Return the watched TLS files of a server, or None without TLS. Raise BadFile if one is unusable."""
    files = server_tls_files(settings)
    return None if files is None else files.watch()


def server_tls_files(settings: ServiceSettings) -> TlsFiles | None:
    """Return the TLS files of a server, or None without TLS."""
    if not settings.tls_cert_file:
        return None
    return TlsFiles(
        NamedFile("tls_client_ca_file", settings.tls_client_ca_file),
        NamedFile("tls_cert_file", settings.tls_cert_file),
        NamedFile("tls_key_file", settings.tls_key_file),
        serves=True,
    )


def server_options(limits: ServerLimits) -> list[tuple[str, int]]:
    """Return gRPC's options by which each acceptor enforces its share of `limits`.

    None of them ends a call that is being served.
    """
    return [
        ("grpc.max_receive_message_length", _HARD_LIMIT_FACTOR * limits.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # gRPC would inflate 64 KiB to 64 MiB; deserialize.py inflates within the bound.
        ("grpc.per_message_decompression", 0),
        ("grpc.compression_enabled_algorithms_bitset", 1 << _IDENTITY | 1 << _GZIP),
        # Between two different bounds gRPC would refuse some calls at random.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        ("grpc.max_concurrent_streams", limits.max_concurrent_rpcs),
        ("grpc.max_allowed_incoming_connections", -(-limits.max_connections // ACCEPTORS)),
        ("grpc.server_handshake_timeout_ms", _milliseconds(limits.handshake_timeout_s)),
        *KEEPALIVE,
        # Peers ping as often as we do, also while no call is open.
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(limits.min_ping_interval_s)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.max_ping_strikes", _MAX_PING_STRIKES),
        *_connection_ages(limits),
    ]


def _connection_ages(limits: ServerLimits) -> list[tuple[str, int]]:
    """Return the bounds that are set, without a grace: gRPC then waits for the calls of an old connection."""
    ages = {
        "grpc.max_connection_idle_ms": limits.max_connection_idle_s,
        "grpc.max_connection_age_ms": limits.max_connection_age_s,
    }
    return [(name, _milliseconds(seconds)) for name, seconds in ages.items() if seconds]


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1000)

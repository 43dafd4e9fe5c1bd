"""Channels: how one notices that its peer has gone, and finds it again; and what it trusts."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from galley.common.tls.channels import ReloadingChannel
from galley.common.tls.files import LOOK_EVERY_S
from galley.common.tls.material import Material, TlsFiles, channel_credentials

# A peer that is gone without a word (a partition, a lost machine) is noticed within 15 seconds.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
# A peer that comes back must be found at once, not after a long back-off.
RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class ChannelTls:
    """TLS to servers that have `name` in their certificate; empty: the host of their address."""

    def __init__(self, files: TlsFiles, name: str = "") -> None:
        """Raises BadFile."""
        self.files = files.watch(LOOK_EVERY_S)
        self.options = (("grpc.ssl_target_name_override", name),) if name else ()


def open_channel(
    address: str,
    tls: ChannelTls | None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    options: Sequence[tuple[str, int | str]] = (),
) -> grpc.aio.Channel:
    """A channel to the server at `address`, over TLS if there is any; for calls of the running event loop."""
    if tls is None:
        told = [*KEEPALIVE, *RECONNECT, *options]
        return grpc.aio.insecure_channel(address, interceptors=interceptors, options=told)
    told = [*KEEPALIVE, *RECONNECT, *tls.options, *options]

    def open_with(material: Material) -> grpc.aio.Channel:
        credentials = channel_credentials(material)
        return grpc.aio.secure_channel(address, credentials, interceptors=interceptors, options=told)

    return ReloadingChannel(address, open_with, tls.files)

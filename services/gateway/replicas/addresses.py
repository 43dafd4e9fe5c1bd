"""Channels to targets and drafts: in plain text, or over TLS with files that may change while in use."""

from __future__ import annotations

import grpc

from galley.common.server.server import Parts
from galley.common.tls.channels import ChannelTls, open_channel
from galley.common.tls.credentials import Material, TlsFiles
from galley.common.tls.files import NamedFile, WatchedFiles
from services.gateway.settings import GatewaySettings

_UNBOUNDED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class ReplicaChannels:
    """Opens channels as the settings say."""

    def __init__(self, settings: GatewaySettings) -> None:
        """Raise BadFile if a TLS file is unusable."""
        self._targets = _channel_tls(settings.target_tls_name, settings)
        self._drafts = _channel_tls(settings.draft_tls_name, settings)

    @property
    def files(self) -> WatchedFiles[Material] | None:
        """Return the certificates that the channels present, None in plain text."""
        return None if self._targets is None else self._targets.files

    def open_target(self, address: str, parts: Parts) -> grpc.aio.Channel:
        """Return a channel to the target at this address."""
        return _open(address, self._targets, parts)

    def open_draft(self, address: str, parts: Parts) -> grpc.aio.Channel:
        """Return a channel to the draft at this address."""
        return _open(address, self._drafts, parts)


def _channel_tls(name: str, settings: GatewaySettings) -> ChannelTls | None:
    if not settings.peer_ca_file:
        return None
    files = TlsFiles(
        NamedFile("peer_ca_file", settings.peer_ca_file),
        NamedFile("peer_cert_file", settings.peer_cert_file),
        NamedFile("peer_key_file", settings.peer_key_file),
    )
    return ChannelTls(files, name)


def _open(address: str, tls: ChannelTls | None, parts: Parts) -> grpc.aio.Channel:
    return open_channel(address, tls, parts.telemetry.client_interceptors(), _UNBOUNDED)

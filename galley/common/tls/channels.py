"""Open channels that notice lost peers, reconnect at once, and follow changes of their TLS files.

After a change of the files, a second connection is made with the new ones. Calls use the old connection until
the new one is ready, so files that do not match the peer yet fail no call. The old connection closes after
its last call; if it breaks it is not made again. The Python client imports this: it needs grpc alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

import grpc
import grpc.aio

from galley.common.tls.files import WatchedFiles

# A peer that vanishes (a partition, a lost machine) is noticed within 15 seconds; one whose system still
# acknowledges, within 15 seconds of a ping. While gRPC's own ping for
# flow control is unanswered, it sends no keepalive ping. That ping may take 60 s by default.
KEEPALIVE = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", 15_000),
)
# A peer that comes back is found at once, not after a long back-off.
RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_LOG = logging.getLogger(__name__)
_READY = grpc.ChannelConnectivity.READY


@dataclass(frozen=True, slots=True)
class Material:
    """Contents of the files, None where there is no file. The certificate expires at `expires`."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    expires: datetime | None = None


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Return the credentials of a channel; without authorities it trusts the public ones of gRPC."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


class ChannelTls:
    """TLS to servers whose certificate has `name`; empty: the host of their address."""

    def __init__(self, files: WatchedFiles[Material], name: str = "") -> None:
        self.files = files
        self.options = (("grpc.ssl_target_name_override", name),) if name else ()


def open_channel(
    address: str,
    tls: ChannelTls | None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    options: Sequence[tuple[str, int | str]] = (),
) -> grpc.aio.Channel:
    """Return a channel to `address` (host:port), over TLS if given, for calls of the running event loop."""
    if tls is None:
        plain = [*KEEPALIVE, *RECONNECT, *options]
        return grpc.aio.insecure_channel(address, interceptors=interceptors, options=plain)
    secure = [*KEEPALIVE, *RECONNECT, *tls.options, *options]

    def open_with(material: Material) -> grpc.aio.Channel:
        credentials = channel_credentials(material)
        return grpc.aio.secure_channel(address, credentials, interceptors=interceptors, options=secure)

    return ReloadingChannel(address, open_with, tls.files)


def generation_of(channel: grpc.aio.Channel) -> Callable[[], int]:
    """Return a function that returns the channel's generation; a plain channel keeps generation 0."""
    if isinstance(channel, ReloadingChannel):
        return lambda: channel.generation
    return lambda: 0


class _Connection:
    def __init__(self, channel: grpc.aio.Channel, material: Material) -> None:
        self.channel = channel
        self.material = material
        self.calls = 0
        self.retired = False


class ReloadingChannel(grpc.aio.Channel):
    """A `grpc.aio.Channel` over channels that `open_channel` opens, one for each version of `files`."""

    def __init__(
        self,
        address: str,
        open_channel: Callable[[Material], grpc.aio.Channel],
        files: WatchedFiles[Material],
    ) -> None:
        self._address = address
        self._open_channel = open_channel
        self._files = files
        self._connections: set[_Connection] = set()
        self._active = self._open(files.latest())
        self._next: _Connection | None = None
        self._generation = 0
        self._connecting: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def generation(self) -> int:
        """Return a number that grows when calls begin to use another connection."""
        self._current()
        return self._generation

    # ------------------------------------------------------------------ the interface of grpc.aio --

    def unary_unary(self, *method: Any, **serializers: Any) -> Any:
        return self._multi_callable(lambda channel: channel.unary_unary(*method, **serializers))

    def unary_stream(self, *method: Any, **serializers: Any) -> Any:
        return self._multi_callable(lambda channel: channel.unary_stream(*method, **serializers))

    def stream_unary(self, *method: Any, **serializers: Any) -> Any:
        return self._multi_callable(lambda channel: channel.stream_unary(*method, **serializers))

    def stream_stream(self, *method: Any, **serializers: Any) -> Any:
        return self._multi_callable(lambda channel: channel.stream_stream(*method, **serializers))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        self._closed = True
        await self._stop_connecting()
        channels = [connection.channel for connection in self._connections]
        await asyncio.gather(*(channel.close(grace) for channel in channels), *self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---------------------------------------------------------------------------------- calls --

    def _multi_callable(self, make: Callable[[grpc.aio.Channel], Any]) -> Callable[..., Any]:
        made_for, method = self._active, make(self._active.channel)

        def call(*request: Any, **options: Any) -> Any:
            nonlocal made_for, method
            connection = self._current()
            if connection is not made_for:
                made_for, method = connection, make(connection.channel)
            started = method(*request, **options)
            connection.calls += 1
            started.add_done_callback(lambda _: self._call_ended(connection))
            return started

        return call

    def _call_ended(self, connection: _Connection) -> None:
        connection.calls -= 1
        self._close_if_unused(connection)

    # ----------------------------------------------------------------------------- connections --

    def _current(self) -> _Connection:
        material = self._files.latest()
        if material is not (self._next or self._active).material:
            self._reload(material)
        if self._next is not None and self._active.channel.get_state() is not _READY:
            self._switch_to(self._next)  # a broken connection is not made again with the old files
        return self._active

    def _reload(self, material: Material) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._next is not None:
            self._retire(self._next)
        self._next = self._open(material)
        # In a context of its own, because the call that noticed the change has its own span.
        self._connecting = asyncio.create_task(self._connect(self._next), context=contextvars.Context())

    async def _connect(self, connection: _Connection) -> None:
        logged = False
        while (state := connection.channel.get_state(try_to_connect=True)) is not _READY:
            if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not logged:
                logged = True
                _LOG.warning("connection with new TLS files failed", extra={"address": self._address})
            await connection.channel.wait_for_state_change(state)
        if connection is self._next:
            self._switch_to(connection)

    def _switch_to(self, connection: _Connection) -> None:
        before, self._active, self._next = self._active, connection, None
        self._generation += 1
        self._retire(before)

    def _open(self, material: Material) -> _Connection:
        connection = _Connection(self._open_channel(material), material)
        self._connections.add(connection)
        return connection

    def _retire(self, connection: _Connection) -> None:
        connection.retired = True
        self._close_if_unused(connection)

    def _close_if_unused(self, connection: _Connection) -> None:
        is_unused = connection.retired and not connection.calls
        if not is_unused or self._closed or connection not in self._connections:
            return
        self._connections.remove(connection)
        closing = asyncio.create_task(connection.channel.close(), context=contextvars.Context())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _stop_connecting(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})

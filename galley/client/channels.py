"""Connections to gateways, over TLS files that may be replaced while a client is open."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import grpc.aio

from galley.client.errors import BadTlsFile
from galley.client.options import Tls
from galley.pb.galley.v1 import galley_pb2_grpc as rpc

Stub: TypeAlias = "rpc.GenerationAsyncStub"

_log = logging.getLogger(__name__)
_CHECK_FILES_EVERY_S = 1.0
_OPTIONS = (
    # A gateway that vanishes (a partition, a lost machine) is noticed within 15 seconds.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A gateway that returns is found at once, not after a long back-off.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class TlsFiles:
    """The files of one `Tls`. Raises BadTlsFile if one cannot be used."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._paths = {
            name: Path(path) for name in ("ca_file", "cert_file", "key_file") if (path := getattr(tls, name))
        }
        for name, other in (("cert_file", "key_file"), ("key_file", "cert_file")):
            if other in self._paths and name not in self._paths:
                raise BadTlsFile(name, f"required with {other}")
        self._versions = self._current_versions()
        self._checked_s = time.monotonic()
        self.credentials()

    def have_changed(self) -> bool:
        """Return True, once for each change, if a file is another than before; looks once a second."""
        now_s = time.monotonic()
        if now_s - self._checked_s < _CHECK_FILES_EVERY_S:
            return False
        self._checked_s = now_s
        before, self._versions = self._versions, self._current_versions()
        return before != self._versions

    def credentials(self) -> grpc.ChannelCredentials:
        """Return credentials of the files as they are now; without a CA file, gRPC's own authorities."""
        ca, cert, key = (self._read(name) for name in ("ca_file", "cert_file", "key_file"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if ca is not None:
            try:
                context.load_verify_locations(cadata=ca.decode())
            except (ssl.SSLError, ValueError):
                raise BadTlsFile("ca_file", f"{self._tls.ca_file}: holds no certificate") from None
        if cert is not None and key is not None:
            if b"PRIVATE KEY-----" not in key:
                raise BadTlsFile("key_file", f"{self._tls.key_file}: holds no private key")
            try:
                # The empty password keeps OpenSSL from asking for one on the terminal.
                context.load_cert_chain(self._tls.cert_file, self._tls.key_file, password="")
            except (ssl.SSLError, OSError, ValueError) as error:
                reason = getattr(error, "reason", None) or error
                problem = f"{self._tls.cert_file}: cannot be used with key_file: {reason}"
                raise BadTlsFile("cert_file", problem) from None
        return grpc.ssl_channel_credentials(ca, key, cert)

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Return the channel options for the name that the gateway's certificate must hold."""
        name = self._tls.server_name
        return (("grpc.ssl_target_name_override", name),) if name else ()

    def _read(self, name: str) -> bytes | None:
        if name not in self._paths:
            return None
        try:
            return self._paths[name].read_bytes()
        except OSError as error:
            raise BadTlsFile(name, f"{self._paths[name]}: {error.strerror}") from None

    def _current_versions(self) -> list[tuple[int, int, int] | None]:
        versions: list[tuple[int, int, int] | None] = []
        for path in self._paths.values():
            try:
                stat = path.stat()
            except OSError:
                versions.append(None)
            else:
                versions.append((stat.st_ctime_ns, stat.st_ino, stat.st_size))
        return versions


class _Connection:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: Stub = rpc.GenerationStub(channel)
        self.calls = 0


class Gateway:
    """The connection to one gateway. Use within a running event loop.

    After a TLS file has changed, new calls use a new connection once it is established. Calls under way stay
    on the old one, which is closed after the last of them.
    """

    def __init__(self, open_channel: Callable[[], grpc.aio.Channel], files: TlsFiles | None = None) -> None:
        """Call `open_channel` now, and again for each change of `files`."""
        self._open_channel = open_channel
        self._files = files
        self._current = _Connection(open_channel())
        self._next: _Connection | None = None
        self._retired: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def call(self, make: Callable[[Stub], Any]) -> Any:
        """Return the call that `make(stub)` starts."""
        if self._files is None:
            return make(self._current.stub)
        self._follow(self._files)
        connection = self._current
        call = make(connection.stub)
        connection.calls += 1
        call.add_done_callback(lambda _: self._call_ended(connection))
        return call

    async def close(self) -> None:
        """Close all connections, and with them the calls under way."""
        for task in self._tasks:
            task.cancel()
        open_now = [self._current, *self._retired, *([self._next] if self._next else [])]
        await asyncio.gather(*(connection.channel.close() for connection in open_now))

    def _follow(self, files: TlsFiles) -> None:
        if files.have_changed():
            try:
                connection = _Connection(self._open_channel())
            except BadTlsFile as error:
                _log.warning("TLS files changed and cannot be used; keeping those read before: %s", error)
            else:
                if self._next is not None:
                    self._retire(self._next)
                self._next = connection
                self._start(self._switch(connection))
        if self._next is not None and self._current.channel.get_state() is not grpc.ChannelConnectivity.READY:
            self._switch_now(self._next)  # the old connection is broken: do not re-establish it

    async def _switch(self, connection: _Connection) -> None:
        await connection.channel.channel_ready()
        if self._next is connection:
            self._switch_now(connection)

    def _switch_now(self, connection: _Connection) -> None:
        before, self._current, self._next = self._current, connection, None
        self._retire(before)

    def _retire(self, connection: _Connection) -> None:
        self._retired.add(connection)
        self._close_if_unused(connection)

    def _call_ended(self, connection: _Connection) -> None:
        connection.calls -= 1
        if connection in self._retired:
            self._close_if_unused(connection)

    def _close_if_unused(self, connection: _Connection) -> None:
        if not connection.calls:
            self._retired.discard(connection)
            self._start(connection.channel.close())

    def _start(self, work: Any) -> None:
        # In an empty context: the span of the call that noticed the change is not that of the connection.
        task = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def open_gateway(
    address: str, files: TlsFiles | None, interceptors: Sequence[grpc.aio.ClientInterceptor]
) -> Gateway:
    """Return the connection to the gateway at `address`, in plain text where `files` is None."""

    def open_channel() -> grpc.aio.Channel:
        if files is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS, interceptors=interceptors)
        options = [*_OPTIONS, *files.channel_options()]
        return grpc.aio.secure_channel(
            address, files.credentials(), options=options, interceptors=interceptors
        )

    return Gateway(open_channel, files)

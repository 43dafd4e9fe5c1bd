"""Accept connections over TLS.

An event loop takes one context for all connections, and reports each after its handshake. Here each has the
TLS files of its time, and counts from its beginning.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Sized
from contextlib import suppress

from galley.common.config.settings import ServerLimits
from galley.common.logs import get_logger
from galley.common.tls.files import WatchedFiles

_LACKS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE_S = 1.0
"""Time between two attempts to accept, as asyncio's, while too many files are open."""

_log = get_logger(__name__)


class TlsAcceptor:
    """Hand each connection, once it is secure, to a protocol that `make` returns.

    A connection is closed at once if `limits` allow no more than `connections` and those in their handshake.
    """

    def __init__(
        self,
        bound: socket.socket,
        contexts: WatchedFiles[ssl.SSLContext],
        make: Callable[[], asyncio.BaseProtocol],
        limits: ServerLimits,
        connections: Sized,
    ) -> None:
        """Accept on a socket that listens, in the running event loop."""
        self._bound = bound
        self._contexts = contexts
        self._make = make
        self._limits = limits
        self._connections = connections
        self._handshakes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        bound.setblocking(False)
        self._watch()

    async def close(self) -> None:
        """Take no more connections, and end those in their handshake."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._bound)
        self._bound.close()
        await asyncio.sleep(0)  # tasks that have not begun would leave their sockets open
        handshakes = set(self._handshakes)
        for handshake in handshakes:
            handshake.cancel()
        if handshakes:
            await asyncio.wait(handshakes)

    def _watch(self) -> None:
        self._loop.add_reader(self._bound, self._accept)

    def _accept(self) -> None:
        """Accept one connection: the next one has a turn of its own."""
        try:
            accepted, _ = self._bound.accept()
        except OSError as error:
            if error.errno not in _LACKS:
                return  # none waits any more, or that one is broken
            _log.error("connection not accepted", error=str(error))
            self._loop.remove_reader(self._bound)
            self._pause = self._loop.call_later(_PAUSE_S, self._watch)
            return
        if len(self._connections) + len(self._handshakes) >= self._limits.max_connections:
            accepted.close()
            return
        accepted.setblocking(False)
        handshake = self._loop.create_task(self._secure(accepted))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    async def _secure(self, accepted: socket.socket) -> None:
        try:
            context = await self._contexts.checked()
        except asyncio.CancelledError:
            accepted.close()
            raise
        with suppress(OSError):  # the handshake failed, or took too long
            await self._loop.connect_accepted_socket(
                self._make, accepted, ssl=context, ssl_handshake_timeout=self._limits.handshake_timeout_s
            )

"""Accept connections over TLS, each by the TLS files of its time; an event loop takes one context for all."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from galley.common.logs import get_logger
from galley.common.tls.files import WatchedFiles

_PAUSE_S = 1.0
"""Time between two attempts to accept, as asyncio's, while too many files are open."""

_log = get_logger(__name__)


class TlsAcceptor:
    """Hand each connection, once it is secure, to a protocol that `make` returns.

    A handshake takes `timeout_s` at most.
    """

    def __init__(
        self,
        contexts: WatchedFiles[ssl.SSLContext],
        make: Callable[[], asyncio.BaseProtocol],
        timeout_s: float,
    ) -> None:
        self._contexts = contexts
        self._make = make
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, bound: socket.socket, backlog: int) -> None:
        bound.setblocking(False)
        bound.listen(backlog)
        self._begin(self._accept(bound))

    async def close(self) -> None:
        """Take no more connections, and end those in their handshake."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with bound:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(bound)
                except OSError as error:  # too many files are open
                    _log.error("connection not accepted", error=str(error))
                    await asyncio.sleep(_PAUSE_S)
                    continue
                self._begin(self._secure(accepted))
                await asyncio.sleep(0)  # a waiting connection is accepted without a turn of the event loop

    async def _secure(self, accepted: socket.socket) -> None:
        try:
            context = await self._contexts.checked()
        except asyncio.CancelledError:
            accepted.close()
            raise
        with suppress(OSError):  # the handshake failed, or took too long
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, accepted, ssl=context, ssl_handshake_timeout=self._timeout_s
            )

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

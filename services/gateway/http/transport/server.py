"""The HTTP server of a gateway: uvicorn's protocol in the gateway's own event loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import suppress

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from galley.common.config.settings import ServerLimits
from galley.common.tls.files import WatchedFiles
from services.gateway.http.transport.connection import HttpConnection
from services.gateway.http.transport.handshakes import TlsAcceptor

KEEP_ALIVE_S = 75
"""Time for which an idle connection stays open: longer than load balancers keep theirs."""
_BACKLOG = 1024


class HttpServer:
    """Serve `app` on a bound socket, within `limits`. A client may read nothing for `unread_s`."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ServerLimits,
        unread_s: float,
        tls: WatchedFiles[ssl.SSLContext] | None = None,
    ) -> None:
        self._limits = limits
        self._unread_s = unread_s
        self._tls = tls
        self._state = ServerState()
        self._acceptor: TlsAcceptor | None = None
        self._server: asyncio.Server | None = None
        self._config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            reset_contextvars=True,
        )
        self._config.load()
        # It reports what clients send; errors of ours are logged where they are answered.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    async def start(self, bound: socket.socket) -> None:
        if self._tls is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(self._connection, sock=bound, backlog=_BACKLOG)
            return
        bound.listen(_BACKLOG)
        self._acceptor = TlsAcceptor(
            bound, self._tls, self._connection, self._limits, self._state.connections
        )

    def _connection(self) -> HttpConnection:
        return HttpConnection(self._config, self._state, self._limits, self._unread_s)

    async def stop(self, grace_s: float) -> None:
        """Take no more connections, let open requests end for `grace_s`, and end the others."""
        if self._server is not None:
            self._server.close()
        if self._acceptor is not None:
            await self._acceptor.close()
        connections = [one for one in self._state.connections if isinstance(one, HttpConnection)]
        for connection in connections:
            connection.shutdown()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                for connection in connections:
                    await connection.lost.wait()
        for connection in connections:
            connection.transport.abort()
        tasks = set(self._state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

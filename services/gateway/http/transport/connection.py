"""One HTTP/1.1 connection: uvicorn's protocol with the bounds that the gRPC port has.

A connection has a limited time to send the headers of a request, and headers have a limited size. What a
client does not read is bounded in the transport and in the kernel. A peer that vanishes is noticed by TCP.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from galley.common.config.settings import ServerLimits
from services.gateway.http.transport.errors import ErrorReply

TRANSPORT = "galley.transport"
"""The key of a request's scope under which its transport is."""

_BUFFER_BYTES = 64 * 1024
"""What the transport holds of a response, and again the kernel, before a stream waits for its client."""
# A peer that vanishes is noticed within 15 s, as by gRPC's keepalive.
_TCP = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.SOL_SOCKET, "SO_SNDBUF", _BUFFER_BYTES),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 10),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 1),
)


class HttpConnection(H11Protocol):
    def __init__(self, config: Config, server_state: ServerState, limits: ServerLimits) -> None:
        super().__init__(config, server_state, {})
        self._limits = limits
        self._late: asyncio.TimerHandle | None = None
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        self.transport = transport
        if len(self.connections) >= self._limits.max_connections:
            transport.abort()
            return
        _set_options(transport.get_extra_info("socket"))
        transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        super().connection_made(transport)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_between_requests and self.conn.trailing_data[0]:
            self._expect_headers()
        elif not self._is_between_requests:
            self._stop_waiting()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_waiting()
            scope: Any = self.cycle.scope  # a typed dict, with a key of ours
            scope[TRANSPORT] = self.transport

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, or has too large headers, and end the connection."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.abort()
            return
        reply = ErrorReply(400, msg, "invalid_argument")
        fields = [("content-type", "application/json"), ("content-length", str(len(reply.body)))]
        events: list[h11.Event] = [
            h11.Response(status_code=400, headers=[*fields, ("connection", "close")], reason=b"Bad Request"),
            h11.Data(data=reply.body),
            h11.EndOfMessage(),
        ]
        for event in events:
            if data := self.conn.send(event):
                self.transport.write(data)
        self.transport.close()

    @property
    def _is_between_requests(self) -> bool:
        cycle: Any = self.cycle  # None before the first request, whatever uvicorn declares
        return cycle is None or bool(cycle.response_complete)

    def _expect_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self._limits.handshake_timeout_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _set_options(sock: Any) -> None:
    for level, name, value in _TCP:
        if sock is not None and (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(level, option, value)

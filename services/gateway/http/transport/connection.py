"""One HTTP/1.1 connection: uvicorn's protocol with the bounds that the gRPC port has.

A connection has a limited time to send the headers of a request, and headers have a limited size. Requests
that another server could divide differently are refused. What a client does not read is bounded in the
transport, in the kernel, and in time. A peer that vanishes is noticed by TCP.
"""

from __future__ import annotations

import asyncio
import re
import socket
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from galley.common.config.settings import ServerLimits
from services.gateway.http.transport.errors import ErrorReply

TRANSPORT = "galley.transport"
"""The key of a request's scope under which its transport is."""
DRAIN = "galley.drain"
"""The key under which a function is that waits until the client has taken nearly all that was sent."""

_BUFFER_BYTES = 64 * 1024
"""What the transport holds of a response, and again the kernel, before a stream waits for its client."""
_ENTRY_BYTES = 32
"""What a header counts besides its name and value, as in HTTP/2."""
_FREE_CHUNKS, _CHUNK_BYTES = 256, 1024
"""Chunks of a body beyond the first ones must have so many bytes on average: each takes 15 µs to parse."""
_BLANK_LINE = re.compile(rb"\n\r?\n")
# A peer that vanishes is noticed within 15 s, as by gRPC's keepalive.
_TCP = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.SOL_SOCKET, "SO_SNDBUF", _BUFFER_BYTES),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 10),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 1),
)


class _Requests(h11.Connection):
    """Read requests; refuse headers that are too large before they are parsed, which takes 1 ms a KiB.

    So are bodies in tiny chunks. `refusal` says why a request was refused.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self.refusal = ErrorReply(400, "the request must be HTTP/1.1", "invalid_argument")
        self._max_header_bytes = max_header_bytes
        self._chunks = self._chunk_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            self._check_size(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._check_version(event)
            self._check_framing(event)
            self._chunks = self._chunk_bytes = 0
        elif isinstance(event, h11.Data):
            self._check_chunks(event)
        return event

    def _check_size(self, received: bytes) -> None:
        most = self._max_header_bytes
        end = _BLANK_LINE.search(received, 0, most)
        length = end.start() if end is not None else len(received)
        if length + _ENTRY_BYTES * received.count(b"\n", 0, length) > most:
            self.refusal = ErrorReply(431, f"headers: must be at most {most} bytes", "too_large")
            raise h11.RemoteProtocolError(self.refusal.message)

    def _check_chunks(self, data: h11.Data) -> None:
        self._chunks += data.chunk_start
        self._chunk_bytes += len(data.data)
        if self._chunks > _FREE_CHUNKS + self._chunk_bytes // _CHUNK_BYTES:
            problem = f"body: must come in chunks of at least {_CHUNK_BYTES} bytes on average"
            self.refusal = ErrorReply(400, problem, "invalid_argument")
            raise h11.RemoteProtocolError(problem)

    def _check_version(self, request: h11.Request) -> None:
        if request.http_version not in {b"1.0", b"1.1"}:
            raise h11.RemoteProtocolError(self.refusal.message)

    def _check_framing(self, request: h11.Request) -> None:
        """Refuse bodies whose end another server could see elsewhere (RFC 9112, 6.1)."""
        names = {name for name, _ in request.headers}
        if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
            problem = (
                "transfer-encoding: must come alone and with HTTP/1.1, got it with content-length or HTTP/1.0"
            )
            self.refusal = ErrorReply(400, problem, "invalid_argument", "transfer-encoding")
            raise h11.RemoteProtocolError(problem)


class HttpConnection(H11Protocol):
    def __init__(
        self, config: Config, server_state: ServerState, limits: ServerLimits, unread_s: float
    ) -> None:
        """`unread_s` is the longest time for which a client may read nothing of a response."""
        super().__init__(config, server_state, {})
        self.conn: _Requests = _Requests(limits.max_metadata_bytes)
        self._limits = limits
        self._unread_s = unread_s
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._made_s = 0.0
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        self.transport = transport
        if len(self.connections) >= self._limits.max_connections:
            transport.abort()
            return
        _set_options(transport.get_extra_info("socket"))
        transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        super().connection_made(transport)
        self._made_s = self.loop.time()
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        super().connection_lost(exc)
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_between_requests:  # it has begun a request, or still sends the body of a refused one
            self._expect_headers()
        else:
            self._stop_waiting()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and cycle.response_complete:
            self._expect_reading()  # nothing is written any more that would watch what is left

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_reading()

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_waiting()
            scope: Any = self.cycle.scope  # a typed dict, with a key of ours
            scope[TRANSPORT] = self.transport
            scope[DRAIN] = self.flow.drain
            if self._is_old:
                self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # `refusal` says more
        """Refuse what is no HTTP, or has too large headers, and end the connection."""
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.abort()
            return
        reply = self.conn.refusal
        fields = [("content-type", "application/json"), ("content-length", str(len(reply.body)))]
        events: list[h11.Event] = [
            h11.Response(
                status_code=reply.status,
                headers=[*fields, ("connection", "close")],
                reason=HTTPStatus(reply.status).phrase.encode(),
            ),
            h11.Data(data=reply.body),
            h11.EndOfMessage(),
        ]
        for event in events:
            if data := self.conn.send(event):
                self.transport.write(data)
        self.transport.close()

    @property
    def _is_old(self) -> bool:
        most_s = self._limits.max_connection_age_s
        return bool(most_s) and self.loop.time() - self._made_s >= most_s

    @property
    def _is_between_requests(self) -> bool:
        cycle: Any = self.cycle  # None before the first request, whatever uvicorn declares
        return cycle is None or bool(cycle.response_complete)

    def _expect_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self._limits.handshake_timeout_s, self.transport.abort)

    def _expect_reading(self, before: int = 0) -> None:
        """End the connection if its client reads nothing of what is left of a response."""
        left = self.transport.get_write_buffer_size()
        if before and left >= before:
            self.transport.abort()
        elif left:
            self._stop_watching()
            self._unread = self.loop.call_later(self._unread_s, self._expect_reading, left)

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _set_options(sock: Any) -> None:
    for level, name, value in _TCP:
        if sock is not None and (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(level, option, value)

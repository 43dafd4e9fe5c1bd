"""A slow link: passes TCP connections on, each byte later by the same time, in both directions.

Order is kept, and as much may be on the way as its sender sends: a long link, not a narrow one. The end of
one direction (half-close) and a reset are passed on as bytes are. Connecting itself is not delayed.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_HOST = "127.0.0.1"
# Close with a reset, dropping what was not sent: SO_LINGER on, for no time.
_NO_LINGER = struct.pack("ii", 1, 0)


class Relay:
    """Listens at `address` and passes on to `target`, "host:port" or the path of a unix socket.

    Delays by `delay_s` seconds each way. Use with `async with`; at its end all connections are reset.
    """

    def __init__(self, target: str, delay_s: float) -> None:
        self._target = target
        self._delay_s = delay_s
        self._server: asyncio.Server | None = None
        self._ends: set[_End] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Where it listens, "host:port"; RuntimeError while it does not."""
        if self._server is None:
            raise RuntimeError("a relay listens between `async with` and its end")
        return f"{_HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accepted, _HOST, 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        ends = list(self._ends)
        for end in ends:
            end.reset()
        await asyncio.gather(*(end.gone for end in ends))

    def _accepted(self) -> _End:
        near, far = _End(self._delay_s, self._ends), _End(self._delay_s, self._ends)
        near.other, far.other = far, near
        task = asyncio.ensure_future(self._connect(near, far))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return near

    async def _connect(self, near: _End, far: _End) -> None:
        """What `near` sends meanwhile is kept."""
        loop = asyncio.get_running_loop()
        try:
            if self._target.startswith("/"):
                await loop.create_unix_connection(lambda: far, self._target)
            else:
                host, _, port = self._target.rpartition(":")
                await loop.create_connection(lambda: far, host, int(port))
        except OSError:
            near.reset()
            return
        near.read_on()


class _End(asyncio.Protocol):
    """One end of a connection. What it sends waits in a line until it is due at the `other` end."""

    other: _End

    def __init__(self, delay_s: float, ends: set[_End]) -> None:
        self._delay_s = delay_s
        self._ends = ends
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._line: deque[tuple[asyncio.TimerHandle, Callable[[], None]]] = deque()
        self._silent = False
        self._all_delivered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a relay passes on streams")
        self._transport = transport
        self._ends.add(self)
        if not self.other.connected:
            # What is sent meanwhile waits in the socket.
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        self._later(lambda: self.other.write(data))

    def eof_received(self) -> bool:
        """True: its other direction stays open."""
        if not self._silent:
            self._silent = True
            self._later(self._end_of_direction)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._ends.discard(self)
        # Bytes on their way to it are lost; on their way from it, only with the whole connection.
        if error is not None:
            self._later(self.other.reset)
        self.gone.set_result(None)

    def pause_writing(self) -> None:
        """It takes no more for now: neither do we of the other end."""
        self.other.hold()

    def resume_writing(self) -> None:
        self.other.read_on()

    # ---------------------------------------------------------------------------- the other end --

    @property
    def connected(self) -> bool:
        """From its connection on."""
        return self._transport is not None

    def hold(self) -> None:
        """Read no more until `read_on`."""
        if self._transport is not None and not self._silent:
            self._transport.pause_reading()

    def read_on(self) -> None:
        """Read what it sends."""
        if self._transport is not None and not self._silent:
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        """Send it bytes, unless it is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def end(self) -> None:
        """Send it the end of the other one's direction."""
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._transport.write_eof()
        except OSError:  # reset by its peer, which we had not read
            self.reset()
            self.other.reset()

    def close(self) -> None:
        """Close once all is sent."""
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """End at once, as the peer shall see; nothing more is delivered from here."""
        for handle, _ in self._line:
            handle.cancel()
        self._line.clear()
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock.family == socket.AF_INET and not self._transport.is_closing():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()

    # ----------------------------------------------------------------------------------- the way --

    def _later(self, action: Callable[[], None]) -> None:
        handle = self._loop.call_at(self._loop.time() + self._delay_s, self._next)
        self._line.append((handle, action))

    def _next(self) -> None:
        """By place in the line: timers of one instant come in no given order."""
        _, action = self._line.popleft()
        action()

    def _end_of_direction(self) -> None:
        self._all_delivered = True
        self.other.end()
        if self.other.all_delivered:
            self.close()
            self.other.close()

    @property
    def all_delivered(self) -> bool:
        """Its last byte, and its end, have been delivered."""
        return self._all_delivered

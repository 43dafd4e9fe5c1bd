"""Relay TCP connections in both directions over a link that may be slow, lossy or cut (tests/fakes/link.py).

Order is kept, and any number of bytes may be in flight. The end of one direction (half-close) and a reset are
forwarded like bytes. Connecting is not delayed; over a cut link it hangs, as if SYNs were lost, although the
caller's system shows the connection as established.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tests.fakes.link import Link

_HOST = "127.0.0.1"
# Close with a reset, dropping what was not sent: SO_LINGER on, for no time.
_NO_LINGER = struct.pack("ii", 1, 0)


class Relay:
    """Forward `address` to `target` (host:port or a unix socket); all connections are reset at the end."""

    def __init__(self, target: str | Callable[[], str], link: Link | Callable[[int], Link]) -> None:
        """`target` and `link` may be callables, called for each connection; LookupError resets it."""
        self._target = target
        self._link = link
        self._server: asyncio.Server | None = None
        self._ends: set[_End] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
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
            end.drop()
        await asyncio.gather(*(end.gone for end in ends))

    def _accepted(self) -> _End:
        return _End(self._ends, self._begin)

    def _begin(self, near: _End, port: int) -> None:
        try:
            link = self._link if isinstance(self._link, Link) else self._link(port)
        except LookupError:
            near.over(Link(), near)
            near.drop()
            return
        far = _End(self._ends)
        near.over(link, far)
        far.over(link, near)
        task = asyncio.ensure_future(self._connect(near, far, link))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, near: _End, far: _End, link: Link) -> None:
        loop = asyncio.get_running_loop()
        try:
            await link.whole()
            target = self._target if isinstance(self._target, str) else self._target()
            if target.startswith("/"):
                await loop.create_unix_connection(lambda: far, target)
            else:
                host, _, to_port = target.rpartition(":")
                await loop.create_connection(lambda: far, host, int(to_port))
        except (OSError, LookupError):
            near.drop()
            return
        link.begin(near)
        link.begin(far)
        near.read_on()


class _End(asyncio.Protocol):
    _link: Link
    _other: _End

    def __init__(self, ends: set[_End], on_made: Callable[[_End, int], None] | None = None) -> None:
        self._ends = ends
        self._on_made = on_made
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._line: deque[tuple[float, Callable[[], None]]] = deque()
        self._free_at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._silent = False
        self._all_delivered = False

    def over(self, link: Link, other: _End) -> None:
        self._link, self._other = link, other

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a relay passes on streams")
        self._transport = transport
        self._ends.add(self)
        if self._on_made is not None:
            # Older Pythons start to read after this call even if reading is paused.
            self._loop.call_soon(transport.pause_reading)
            self._on_made(self, transport.get_extra_info("peername")[1])

    def data_received(self, data: bytes) -> None:
        self._later(lambda: self._other.write(data), len(data))

    def eof_received(self) -> bool:
        if not self._silent:
            self._silent = True
            self._later(self._end_of_direction)
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._ends.discard(self)
        self.gone.set_result(None)
        if error is not None:
            self._later(self._other.drop)
        self._leave_link()

    def pause_writing(self) -> None:
        self._other.hold()

    def resume_writing(self) -> None:
        self._other.read_on()

    def hold(self) -> None:
        if self._transport is not None and not self._silent:
            self._transport.pause_reading()

    def read_on(self) -> None:
        if self._transport is not None and not self._silent:
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def end(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._transport.write_eof()
        except OSError:  # the peer has reset the connection, which was not read here yet
            self.reset()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        self.drop()
        self._other.drop()

    def drop(self) -> None:
        self._line.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock.family == socket.AF_INET and not self._transport.is_closing():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self._transport.abort()
        self._leave_link()

    def _later(self, action: Callable[[], None], size: int = 0) -> None:
        self._free_at_s = max(self._free_at_s, self._loop.time()) + self._link.sending_s(size)
        due_s = self._free_at_s + self._link.lateness_s()
        if self._line:
            due_s = max(due_s, self._line[-1][0])
        self._line.append((due_s, action))
        if len(self._line) == 1:
            self.pass_on()

    def pass_on(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        while self._line and not self._link.is_cut(requests=self._on_made is not None):
            due_s, action = self._line[0]
            if due_s > self._loop.time():
                self._timer = self._loop.call_at(due_s, self.pass_on)
                return
            self._line.popleft()
            action()
        self._leave_link()

    def _leave_link(self) -> None:
        if self.gone.done() and not self._line:
            self._link.end(self)

    def _end_of_direction(self) -> None:
        self._all_delivered = True
        self._other.end()
        if self._other.all_delivered:
            self.close()
            self._other.close()

    @property
    def all_delivered(self) -> bool:
        return self._all_delivered

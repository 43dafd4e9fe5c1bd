"""HTTP/2 by hand: what no gRPC client would do."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
END_STREAM, END_HEADERS = 1, 4
ENHANCE_YOUR_CALM = 11
INITIAL_WINDOW_SIZE = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PATIENCE_S = 10.0


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


class Connection:
    """One connection, of which the test says every byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def say(self, data: bytes) -> None:
        self._writer.write(data)

    def begin(self, *settings: tuple[int, int]) -> None:
        self.say(_PREFACE)
        self.frame(SETTINGS, b"".join(struct.pack("!HL", *setting) for setting in settings))

    def frame(self, kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> None:
        self.say(_encoded(kind, payload, flags, stream))

    def frames_at_once(self, kind: int, payload: bytes, count: int) -> None:
        self.say(_encoded(kind, payload) * count)

    def call(self, path: str, stream: int = 1) -> None:
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "test",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        block = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self.frame(HEADERS, block, flags=END_HEADERS, stream=stream)

    def message(self, data: bytes, stream: int = 1, *, flags: int = END_STREAM) -> None:
        self.frame(DATA, struct.pack("!BL", 0, len(data)) + data, flags=flags, stream=stream)

    async def frames(self) -> AsyncIterator[Frame]:
        while (frame := await self._frame()) is not None:
            yield frame

    async def _frame(self) -> Frame | None:
        async with asyncio.timeout(PATIENCE_S):
            if not (head := await self._reader.read(9)):
                return None
            head += await self._reader.readexactly(9 - len(head))
            kind, flags, stream = struct.unpack("!BBL", head[3:])
            length = int.from_bytes(head[:3], "big")
            return Frame(kind, flags, stream, await self._reader.readexactly(length))

    async def until(self, kind: int) -> Frame:
        async for frame in self.frames():
            if frame.kind == kind:
                return frame
        raise AssertionError(f"the connection ended without a frame {kind}")

    async def is_closed(self) -> None:
        """Wait until the server has closed it."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            async for _ in self.frames():
                pass


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Connection]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


def _encoded(kind: int, payload: bytes, flags: int = 0, stream: int = 0) -> bytes:
    head = struct.pack("!L", len(payload))[1:] + struct.pack("!BBL", kind, flags, stream)
    return head + payload


def _text(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()

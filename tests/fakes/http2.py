"""HTTP/2 frame by frame, valid or broken, as no gRPC client would send it, and the server's frames."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum

from hpack import Decoder
from hpack.exceptions import HPACKError

from tests.fakes.waiting import PATIENCE_S, Watch

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITISED = 1, 1, 4, 8, 32
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 1, 2, 3, 4
CANCEL, ENHANCE_YOUR_CALM = 8, 11
# Most received frames of a kind that are kept.
_KEPT = 4096


class Kind(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


def frame(
    kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"", length: int | None = None
) -> bytes:
    """Return a frame; `length` replaces the true length of its payload."""
    length = len(payload) if length is None else length
    return struct.pack(">I", length)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(Kind.SETTINGS, payload=b"".join(struct.pack(">HI", name, value) for name, value in pairs))


def reset(stream: int, code: int = CANCEL) -> bytes:
    return frame(Kind.RST_STREAM, stream=stream, payload=struct.pack(">I", code))


def number(value: int, prefix_bits: int, first: int = 0) -> bytes:
    """Encode an HPACK integer behind the bits `first` of its first byte (RFC 7541, 5.1)."""
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes([first | value])
    coded, value = bytearray([first | most]), value - most
    while value >= 0x80:
        coded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*coded, value])


def text(value: bytes) -> bytes:
    return number(len(value), 7) + value


def field_of(name: str | bytes, value: str | bytes, *, indexed: bool = False) -> bytes:
    """Encode a header field literally; `indexed` adds it to the peer's table."""
    name, value = (part.encode() if isinstance(part, str) else part for part in (name, value))
    return (b"\x40" if indexed else b"\x00") + text(name) + text(value)


def head(path: str, more: Iterable[tuple[str | bytes, str | bytes]] = ()) -> bytes:
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    )
    return b"".join(field_of(name, value) for name, value in fields)


def opening(stream: int, path: str, more: Iterable[tuple[str | bytes, str | bytes]] = ()) -> bytes:
    return frame(Kind.HEADERS, END_HEADERS, stream, head(path, more))


def message(data: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """Return a gRPC message with its prefix; `length` replaces the true length."""
    return struct.pack(">BI", compressed, len(data) if length is None else length) + data


@dataclass
class Received:
    frames: Counter[int] = field(default_factory=Counter)
    resets: dict[int, int] = field(default_factory=dict)
    heads: dict[int, dict[str, str]] = field(default_factory=dict)
    settings: dict[int, int] = field(default_factory=dict)
    pongs: int = 0
    goaway: int | None = None
    ended: bool = False


class Wire:
    """A connection that sends nothing by itself, except answers to pings; open it with `wire`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.received = Received()
        self._reader = reader
        self._writer = writer
        self._half_closed = False
        self._decoder = Decoder()
        self._watch = Watch()
        self._task = asyncio.create_task(self._read())

    async def send(self, *data: bytes) -> bool:
        """Send; return True if the server has not closed the connection."""
        if self.received.ended or self._writer.is_closing():
            return False
        self._writer.write(b"".join(data))
        with suppress(ConnectionError):
            await self._writer.drain()
        return not self.received.ended

    async def begin(self, *pairs: tuple[int, int]) -> None:
        await self.send(PREFACE, settings(*pairs))
        await self.until(lambda received: received.ended or received.frames[Kind.SETTINGS] > 0)
        await self.send(frame(Kind.SETTINGS, ACK))

    async def alive(self) -> bool:
        before = self.received.pongs
        await self.send(frame(Kind.PING, payload=b"12345678"))
        await self.until(lambda received: received.ended or received.pongs > before)
        return not self.received.ended

    async def ends(self) -> None:
        await self.until(lambda received: received.ended)

    async def status(self, stream: int) -> str:
        """Return how the call ended: its grpc-status, or `reset` or `closed`."""
        await self.until(
            lambda received: (
                received.ended or stream in received.resets or "grpc-status" in received.heads.get(stream, {})
            )
        )
        status = self.received.heads.get(stream, {}).get("grpc-status")
        return status or ("reset" if stream in self.received.resets else "closed")

    async def until(self, holds: Callable[[Received], bool], patience_s: float = PATIENCE_S) -> None:
        await self._watch.until(lambda: holds(self.received), patience_s)

    def half_close(self) -> None:
        self._half_closed = True
        with suppress(OSError):  # the server may have closed it first
            self._writer.write_eof()

    async def close(self) -> None:
        self._writer.transport.abort()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                prefix = await self._reader.readexactly(HEAD_BYTES)
                length = int.from_bytes(prefix[:3], "big")
                stream = int.from_bytes(prefix[5:], "big") & 0x7FFFFFFF
                self._note(prefix[3], prefix[4], stream, await self._reader.readexactly(length))
                self._watch.changed()
        except (OSError, asyncio.IncompleteReadError):
            self.received.ended = True
            self._watch.changed()

    def _note(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        received = self.received
        received.frames[kind] += 1
        if kind == Kind.PING and not flags & ACK and not self._half_closed:
            self._writer.write(frame(Kind.PING, ACK, 0, payload))
        received.pongs += kind == Kind.PING and flags & ACK
        if kind == Kind.RST_STREAM and len(received.resets) < _KEPT:
            received.resets[stream] = int.from_bytes(payload, "big")
        elif kind == Kind.SETTINGS:
            received.settings.update(struct.iter_unpack(">HI", payload))
        elif kind == Kind.GOAWAY:
            received.goaway = int.from_bytes(payload[4:8], "big")
        elif kind == Kind.HEADERS and flags & END_HEADERS and len(received.heads) < _KEPT:
            with suppress(HPACKError):
                fields = received.heads.setdefault(stream, {})
                fields.update((str(name), str(value)) for name, value in self._decoder.decode(payload))


@asynccontextmanager
async def wire(address: str) -> AsyncIterator[Wire]:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, int(port))
    it = Wire(reader, writer)
    try:
        yield it
    finally:
        await it.close()

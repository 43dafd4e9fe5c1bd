"""Attacks on the HTTP port written byte by byte: framing, headers, connections."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from random import Random
from typing import Any

from tests.attack.stack import BAD, MIB
from tests.fakes.http_client import BODY
from tests.fakes.waiting import PATIENCE_S

_WINDOW_BYTES = 8192
COMPLETIONS = "/v1/completions"
_KEY = f"x-api-key: {BAD}\r\n".encode()
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + _KEY
_GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + _KEY
_LENGTH = re.compile(rb"content-length: (\d+)")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Peer:
    """A connection to the HTTP port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> bool:
        """Return False once the connection has ended."""
        if self.reader.at_eof() or self.reader.exception() is not None:
            return False
        self.writer.write(data)
        with suppress(OSError):
            await self.writer.drain()
            return True
        return False

    async def head(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.readuntil(b"\r\n\r\n")

    def stop_reading(self) -> None:
        transport: Any = self.writer.transport
        transport.pause_reading()


async def _connected(address: str) -> socket.socket:
    """Return a connection of which little fits into the client's buffer."""
    host, _, port = address.rpartition(":")
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW_BYTES)
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, (host, int(port)))
    return narrow


@asynccontextmanager
async def peer(address: str) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection(sock=await _connected(address), limit=_WINDOW_BYTES)
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()


async def statuses(address: str, data: bytes, *, stays: bool = False) -> list[int]:
    """Return the statuses of all responses until the server ends the connection.

    Unless the client `stays`, it ends its side after `data`. It calls the socket itself: asyncio drops
    what came before a connection was reset.
    """
    loop = asyncio.get_running_loop()
    received = b""
    with await _connected(address) as connected:

        async def send() -> None:
            with suppress(OSError):
                await loop.sock_sendall(connected, data)
                if not stays:
                    connected.shutdown(socket.SHUT_WR)

        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            sending = tasks.create_task(send())
            with suppress(OSError):
                while piece := await loop.sock_recv(connected, 1 << 16):
                    received += piece
            sending.cancel()
    return [int(one) for one in _STATUS.findall(received)]


def completion(**given: Any) -> bytes:
    body = json.dumps(BODY | given).encode()
    return _HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def malformed() -> Iterator[tuple[str, bytes]]:
    """Yield requests that must be refused with one 400, and the end of the connection."""
    smuggled = b"0\r\n\r\n" + _GET + b"\r\n"
    length = b"content-length: %d\r\n" % len(smuggled)
    chunked = b"transfer-encoding: chunked\r\n"
    yield "a length, and chunks", _HEAD + length + chunked + b"\r\n" + smuggled
    yield "chunks, and a length", _HEAD + chunked + length + b"\r\n" + smuggled
    yield "chunks in HTTP/1.0", _HEAD.replace(b"1.1", b"1.0") + chunked + b"\r\n" + smuggled
    yield "two lengths", _HEAD + b"content-length: 0\r\n" + length + b"\r\n" + smuggled
    yield "a list of lengths", _HEAD + b"content-length: 0, 5\r\n\r\n" + smuggled
    yield "two encodings", _HEAD + chunked + b"transfer-encoding: identity\r\n\r\n" + smuggled
    yield "an unknown encoding", _HEAD + b"transfer-encoding: xchunked\r\n\r\n" + smuggled
    yield "a hidden encoding", _HEAD + b"transfer-encoding: \x0bchunked\r\n\r\n" + smuggled
    yield "a space before a colon", _HEAD + b"content-length : 5\r\n\r\nabcde"
    for text in (b"-1", b"+5", b"5_0", b"0x5", b"\xb2", b"9" * 5000, b"1e3"):
        yield f"length {text[:9]!r}", _HEAD + b"content-length: " + text + b"\r\n\r\nabcde"
    for text in (b"zz", b"-1", b"0x5", b"f" * 30, b"5 ;\x00", b""):
        yield f"chunk {text[:9]!r}", _HEAD + chunked + b"\r\n" + text + b"\r\nabcde\r\n0\r\n\r\n"
    yield "a chunk without its end", _HEAD + chunked + b"\r\n5\r\nabcdeXX0\r\n\r\n"
    yield "two hosts", _GET + b"host: y\r\n\r\n"
    yield "no host", b"GET /health HTTP/1.1\r\n\r\n"
    yield "bytes in a name", _GET + b"\xff\xfe: y\r\n\r\n"
    yield "a zero in a value", _GET + b"a: b\0c\r\n\r\n"
    yield "a carriage return in a value", _GET + b"a: b\rc: d\r\n\r\n"
    yield "a zero in a path", b"GET /v1/\0models HTTP/1.1\r\nhost: x\r\n\r\n"
    yield "bytes in a path", b"GET /v1/\xff HTTP/1.1\r\nhost: x\r\n\r\n"
    yield "no method", b" / HTTP/1.1\r\nhost: x\r\n\r\n"
    yield "three words", b"GET / now HTTP/1.1\r\nhost: x\r\n\r\n"
    yield "blank lines", b"\r\n" * 5000
    yield "TLS", bytes.fromhex("16030100c8010000c40303") + bytes(190)
    yield "HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


BOMBS = {
    "one of 1 MiB": b"x: " + b"a" * MIB,
    "60,000 of them": b"a:\r\n" * 60_000,
    "60,000 lines of one": b"x: a\r\n" + b" a\r\n" * 60_000,
    "4,000 of them": b"a:\r\n" * 4000,
    "spaces": b"x:" + b" " * 250_000 + b"a\r\n",
    "a key of 1 MiB": b"authorization: Bearer " + b"k" * MIB + b"\r\n",
}


def header_bomb(name: str, *, after: bytes = b"") -> bytes:
    return after + _GET + BOMBS[name] + b"\r\n\r\n"


def pipelined(count: int) -> bytes:
    """Return a smuggled request within a body, between `count` requests."""
    body = b"{}" + _GET + b"\r\n"
    inside = _HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    return (_GET + b"\r\n") * (count - 1) + inside + _GET + b"connection: close\r\n\r\n"


def noise(random: Random, count: int) -> Iterator[bytes]:
    """Yield requests of which bytes were changed, removed or repeated."""
    for _ in range(count):
        data = bytearray(random.choice((completion(), completion(stream=True), _GET + b"\r\n", _chunks())))
        for _ in range(random.randint(1, 6)):
            at = random.randrange(len(data) + 1)
            end = at + random.randrange(40)
            data[at:end] = random.choice(
                (b"", data[at:end] * 2, random.randbytes(3), b"\r\n", b"\0", b'"', b"\xed\xa0\x80")
            )
        yield bytes(data)


def _chunks() -> bytes:
    body = json.dumps(BODY).encode()
    pieces = (b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:7], body[7:]))
    return _HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"".join(pieces) + b"0\r\n\r\n"


async def slow_requests(address: str, opened: AsyncExitStack, count: int) -> list[Peer]:
    """Open connections that send headers or a body byte by byte, and never their end."""
    peers = [await opened.enter_async_context(peer(address)) for _ in range(count)]
    for index, attacker in enumerate(peers):
        data = completion()
        await attacker.send(b"" if index % 2 else _HEAD + b"content-length: 500\r\n\r\n")
        for byte in data[:-1] if index % 2 else data[:40]:
            await attacker.send(bytes([byte]))
            await asyncio.sleep(0)
    return peers


async def unread(address: str, opened: AsyncExitStack, count: int, **given: Any) -> list[Peer]:
    """Open streams, and read nothing but their headers."""
    peers = []
    for _ in range(count):
        attacker = await opened.enter_async_context(peer(address))
        await attacker.send(completion(stream=True, **given))
        assert (await attacker.head()).startswith(b"HTTP/1.1 200")
        attacker.stop_reading()
        peers.append(attacker)
    return peers


async def unread_responses(address: str, opened: AsyncExitStack, count: int) -> None:
    """Ask for descriptions of the API, which needs no key, and read none of them."""
    for _ in range(count):
        attacker = await opened.enter_async_context(peer(address))
        attacker.stop_reading()
        await attacker.send(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 40)


async def nearly_read(address: str, opened: AsyncExitStack, left: int) -> None:
    """Ask for a large file, which needs no key, and read all but the last `left` bytes of it."""
    attacker = await opened.enter_async_context(peer(address))
    await attacker.send(b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    [length] = _LENGTH.findall(await attacker.head())
    async with asyncio.timeout(PATIENCE_S):
        await attacker.reader.readexactly(int(length) - left)
    attacker.stop_reading()


async def idle(address: str, opened: AsyncExitStack, count: int) -> int:
    """Open connections that send nothing, and return how many of them are still open."""
    peers = [await opened.enter_async_context(peer(address)) for _ in range(count)]
    return sum([await one.send(b"G") for one in peers])

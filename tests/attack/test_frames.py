"""What is no HTTP/2, or too much of it, on the ports of real services, while somebody uses them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.attack.http2 import (
    ACK,
    END_HEADERS,
    END_STREAM,
    INITIAL_WINDOW_SIZE,
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
    text,
    wire,
)
from tests.attack.stack import MIB, SERVICES, Attacked, unharmed

if TYPE_CHECKING:
    from collections.abc import Iterator

WATCH = "/grpc.health.v1.Health/Watch"
CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(32)) + b"\x00" * 163
BEGUN = PREFACE + settings()


@dataclass(frozen=True)
class Sent:
    """Bytes that no client of good faith sends; `begun` says whether behind a proper beginning."""

    name: str
    data: bytes
    begun: bool = True


def cases() -> Iterator[Sent]:
    call = head(WATCH)
    whole = END_HEADERS | END_STREAM
    yield Sent("nothing", b"", begun=False)
    yield Sent("noise", bytes(range(256)) * 64, begun=False)
    yield Sent("TLS", CLIENT_HELLO, begun=False)
    yield Sent("HTTP/1.1", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", begun=False)
    yield Sent("an endless line", b"GET /" + b"a" * MIB, begun=False)
    yield Sent("half a preface", PREFACE[:13], begun=False)
    yield Sent("a preface and no settings", PREFACE + opening(1, WATCH), begun=False)
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


@pytest.mark.parametrize("service", SERVICES)
async def test_what_is_no_http2_harms_nobody(stack: Attacked, service: str) -> None:
    address = stack.addresses[service]
    async with unharmed(stack):
        for case in cases():
            async with wire(address) as attacker:
                if case.begun:
                    await attacker.begin()
                await attacker.send(case.data)
                attacker.half_close()
                await attacker.ends()


async def flood(attacker: Wire, data: bytes, times: int) -> None:
    """Send it so often, or until the server has enough."""
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


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_of_frames_is_borne_or_cut_off(stack: Attacked, name: str) -> None:
    async with unharmed(stack), wire(stack.gateway) as attacker:
        await attacker.begin()
        if name == "empty headers":
            await attacker.send(frame(Kind.HEADERS, 0, 1, head(WATCH)))
        else:
            await attacker.send(opening(1, WATCH))
        await flood(attacker, FLOODS[name], 20_000)


async def test_streams_opened_and_reset_at_once_do_not_hold_others_up(stack: Attacked) -> None:
    """Rapid reset (CVE-2023-44487)."""
    async with unharmed(stack):
        for _ in range(4):
            async with wire(stack.gateway) as attacker:
                await attacker.begin()
                for first in range(1, 5_000, 100):
                    pairs = ((opening(s, WATCH), reset(s)) for s in range(first, first + 100, 2))
                    if not await attacker.send(*(part for pair in pairs for part in pair)):
                        break


HEADER_BOMBS = {
    "one of 1 MiB": [field_of("x-bomb", "a" * MIB)],
    "100,000 of them": [field_of(f"x-{i}", "a") for i in range(100_000)],
    "one name, 60,000 times": [field_of("x-bomb", "a")] * 60_000,
    # A name and value of 4 KiB into the table, and then a byte for each time that it is meant again.
    "4 KiB a byte": [field_of("x-bomb", "a" * 4000, indexed=True), b"\xbe" * 200_000],
    "a name without end": [b"\x40" + number(2**31, 7) + b"a" * MIB],
    "a key of 1 MiB": [field_of("authorization", "Bearer " + "k" * MIB)],
    "bytes": [field_of("x-bomb-bin", b"A" * MIB)],
}


@pytest.mark.parametrize("name", HEADER_BOMBS)
async def test_a_header_bomb_is_refused_or_its_connection_cut(stack: Attacked, name: str) -> None:
    block = head(WATCH) + b"".join(HEADER_BOMBS[name])
    pieces = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    stack.forget_peak()
    async with unharmed(stack) as before:
        for _ in range(2):
            async with wire(stack.gateway) as attacker:
                await attacker.begin()
                await attacker.send(frame(Kind.HEADERS, 0, 1, pieces[0]))
                for piece in pieces[1:-1]:
                    await attacker.send(frame(Kind.CONTINUATION, 0, 1, piece))
                await attacker.send(frame(Kind.CONTINUATION, END_HEADERS, 1, pieces[-1]))
                await attacker.send(frame(Kind.DATA, END_STREAM, 1, message(b"")))
                assert await attacker.status(1) in {"8", "13", "reset", "closed"}
    assert stack.peak_rss() - before.rss < 64 * MIB


async def test_headers_that_never_end_are_not_kept(stack: Attacked) -> None:
    """A CONTINUATION flood (CVE-2024-27316 and its like): 256 MiB of one header block."""
    stack.forget_peak()
    piece = frame(Kind.CONTINUATION, 0, 1, field_of("x", "a" * 16_000))
    async with unharmed(stack) as before, wire(stack.gateway) as attacker:
        await attacker.begin()
        await attacker.send(frame(Kind.HEADERS, 0, 1, head(WATCH)))
        await flood(attacker, piece, 16_384)
    assert stack.peak_rss() - before.rss < 128 * MIB


def test_text_is_hpack() -> None:
    """The tools of this file, held against the letter: RFC 7541, C.1 and C.2.1."""
    assert number(10, 5) == b"\x0a"
    assert number(1337, 5) == b"\x1f\x9a\x0a"
    assert field_of("custom-key", "custom-header", indexed=True) == b"\x40\x0acustom-key\x0dcustom-header"
    assert text(b"") == b"\x00"

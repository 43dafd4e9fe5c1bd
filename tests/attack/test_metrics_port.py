"""Attacks on the metrics port: noise, slow requests, bombs, many clients; and on `galley top` by a server."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import pytest

from galley.common.metrics import scrape as port
from galley.common.metrics.registry import Registry
from galley.top.scrape import MAX_BYTES, MAX_LINE, MAX_ROWS, Away, scrape
from galley.top.series import Samples
from tests.attack.stack import MIB, Attacked, unharmed
from tests.fakes.metric_servers import answering
from tests.fakes.waiting import PATIENCE_S

REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
SEED = 20261122


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, number = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer_to(address: str, data: bytes) -> bytes:
    async with asyncio.timeout(PATIENCE_S), connected(address) as (reader, writer):
        writer.write(data)
        with suppress(OSError):
            await writer.drain()
            writer.write_eof()
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


def bombs(random: Random) -> list[bytes]:
    lines = [b"GET /metrics HTTP/1.1", b"Host: x", b"Accept: */*", b"", b""]
    return [
        b"",
        b"\r\n" * 5000,
        b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 10_000 + b"\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"x" * MIB,
        b"GET /metrics HTTP/1.1\r\nAccept: " + b"application/openmetrics-text;" * 200 + b"\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nAccept: \xff\xfe\x00\r\n\r\n",
        b"GET http://x@127.0.0.1/metrics HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\nHost: x\n\n",
        b"POST /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n",
        b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + bytes(190),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        *(random.randbytes(random.choice((1, 100, 10_000))) for _ in range(50)),
        *(_mixed(random, lines) for _ in range(200)),
    ]


def _mixed(random: Random, lines: list[bytes]) -> bytes:
    data = bytearray(b"\r\n".join(random.choices(lines, k=5)) + b"\r\n\r\n")
    for _ in range(random.randrange(4)):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


async def test_any_bytes_get_a_status_or_no_response(stack: Attacked) -> None:
    async with unharmed(stack):
        for address in stack.metrics.values():
            for data in bombs(Random(SEED)):
                response = await answer_to(address, data)
                assert not response or response[:12] in {
                    b"HTTP/1.1 200",
                    b"HTTP/1.1 400",
                    b"HTTP/1.1 404",
                    b"HTTP/1.1 405",
                    b"HTTP/1.1 431",
                }
            assert b"galley_build_info" in await answer_to(address, REQUEST)


async def test_excess_requests_are_refused_without_leak(stack: Attacked) -> None:
    address = stack.metrics["gateway"]
    async with unharmed(stack):
        response = await asyncio.gather(*(answer_to(address, REQUEST) for _ in range(300)))
        assert any(response)
        assert b"galley_build_info" in await answer_to(address, REQUEST)


async def test_slow_request_is_cut_off_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "TIMEOUT_S", 0.4)
    server = port.ScrapeServer(Registry("gateway"))
    address = await server.start("127.0.0.1", 0)
    try:
        async with connected(address) as (reader, writer):
            began_s = time.monotonic()
            for byte in REQUEST * 3:
                writer.write(bytes([byte]))
                if reader.at_eof() or reader.exception() is not None:
                    break
                await asyncio.sleep(0.02)
            assert 0.3 < time.monotonic() - began_s < 20
    finally:
        await server.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
LYING: dict[str, bytes] = {
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
    "headers without end": HEAD + b"x: y\r\n" * 20_000,
    "one header of 1 MiB": HEAD + b"x: " + b"y" * MIB + b"\r\n\r\n",
    "a length that is none": HEAD + b"Content-Length: -5\r\n\r\ngalley_a 1\n",
    "a length of a terabyte": HEAD + b"Content-Length: 1000000000000\r\n\r\ngalley_a 1\n",
    "chunks without end": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000,
    "a chunk of a terabyte": HEAD + b"Transfer-Encoding: chunked\r\n\r\nE8D4A51000\r\nx",
    "what is compressed": HEAD + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(MIB)),
    "more than may be": HEAD + b"\r\n" + b"galley_a 1\n" * (MAX_BYTES // 8),
    "more rows than may be": HEAD + b"\r\n" + b"galley_a 1\n" * (MAX_ROWS + 1),
    "a line that is too long": HEAD + b'\r\ngalley_a{w="' + b"x" * MAX_LINE + b'"} 1\n',
    "an old version of HTTP": b"galley_a 1\n",
    "a hundred statuses": b"HTTP/1.1 100 Continue\r\n\r\n" * 50_000,
}


async def _read(address: str) -> tuple[Samples, str]:
    try:
        return await scrape(address), ""
    except Away as away:
        return {}, str(away)


@pytest.mark.parametrize("name", LYING)
async def test_galley_top_bounds_reads_from_replicas(name: str) -> None:
    async with answering(lambda writer: _send(writer, LYING[name])) as address:
        began_s = time.monotonic()
        samples, problem = await _read(address)
        assert set(samples) <= {"galley_a"}
        assert len(problem) < 200
        assert time.monotonic() - began_s < 30


def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    writer.write_eof()


QUOTES = b'galley_a{w="' + b'\\"' * (MAX_LINE // 2 - 20) + b'"} 1\n'
LABELS = b"galley_a{" + b",".join(b'a%d="%d"' % (i, i) for i in range(300)) + b"} 1\n"


@pytest.mark.parametrize("line", [QUOTES, LABELS], ids=["quotes", "labels"])
async def test_lines_made_to_be_read_slowly_are_read_in_time(line: bytes) -> None:
    body = line * min(MAX_ROWS, (MAX_BYTES - 1000) // len(line))
    async with answering(lambda writer: _send(writer, HEAD + b"\r\n" + body)) as address:
        began_s = time.monotonic()
        await _read(address)
        assert time.monotonic() - began_s < 30

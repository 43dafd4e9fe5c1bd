"""The port that Prometheus fetches metrics from: what it answers, and what it does not put up with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from galley.common.config.settings import OFF
from galley.common.metrics import scrape
from galley.common.metrics.metering import start_metering
from galley.common.metrics.registry import Registry
from galley.common.metrics.scrape import MAX_CONNECTIONS, MAX_REQUEST_BYTES, OPEN_METRICS, TEXT, ScrapeServer

PATIENCE_S = 10.0


@asynccontextmanager
async def serving(registry: Registry | None = None) -> AsyncIterator[str]:
    server = ScrapeServer(registry or Registry("draft"))
    address = await server.start("127.0.0.1", 0)
    try:
        yield address
    finally:
        await server.close()


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def ask(address: str, request: str) -> tuple[int, dict[str, str], str]:
    reader, writer = await connect(address)
    writer.write(request.encode())
    async with asyncio.timeout(PATIENCE_S):
        answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), fields, body


async def test_other_callbacks_run_between_two_responses() -> None:
    registry, in_this_turn, together = Registry("draft"), 0, []

    def turn() -> None:
        nonlocal in_this_turn
        in_this_turn = 0

    def flush() -> None:
        nonlocal in_this_turn
        in_this_turn += 1
        together.append(in_this_turn)
        asyncio.get_running_loop().call_soon(turn)

    registry.before_reading(flush)
    async with serving(registry) as address:
        connections = [await connect(address) for _ in range(MAX_CONNECTIONS)]
        for _, writer in connections:
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        for reader, writer in connections:
            assert (await ended(reader)).startswith(b"HTTP/1.1 200")
            writer.close()
    assert together == [1] * MAX_CONNECTIONS


async def ended(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def test_metrics_are_given_in_the_form_that_is_asked_for() -> None:
    async with serving() as address:
        status, fields, body = await ask(address, "GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (status, fields["content-type"], fields["connection"]) == (200, TEXT, "close")
        assert int(fields["content-length"]) == len(body)
        assert 'galley_build_info{service="draft"' in body

        request = "GET /metrics HTTP/1.1\r\nACCEPT: application/openmetrics-text; version=1.0.0\r\n\r\n"
        status, fields, body = await ask(address, request)
        assert (status, fields["content-type"]) == (200, OPEN_METRICS)
        assert body.endswith("# EOF\n")

        status, headed, nothing = await ask(address, "HEAD /metrics HTTP/1.1\r\n\r\n")
        assert (status, nothing) == (200, "")
        assert int(headed["content-length"]) > 0


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        ("POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
        ("GET / HTTP/1.1\r\n\r\n", 404),
        ("GET /metrics/../etc/passwd HTTP/1.1\r\n\r\n", 404),
        ("nonsense\r\n\r\n", 400),
        ("GET /metrics SPDY/3\r\n\r\n", 400),
        ("GET /metrics HTTP/1.1\r\nX: " + MAX_REQUEST_BYTES * "x" + "\r\n\r\n", 431),
    ],
    ids=["method", "path", "traversal", "nonsense", "protocol", "long"],
)
async def test_nothing_else_is_to_be_had(request_text: str, status: int) -> None:
    async with serving() as address:
        answered, fields, body = await ask(address, request_text)
    assert (answered, body) == (status, "")
    assert fields["allow"] == "GET, HEAD"


async def test_connections_are_bounded_and_a_slow_one_blocks_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scrape, "TIMEOUT_S", 0.2)
    async with serving() as address:
        slow = [await connect(address) for _ in range(MAX_CONNECTIONS - 1)]
        for _, writer in slow:
            writer.write(b"GET /metrics HTTP/1.1\r\nAccept: ")
        status, _, _ = await ask(address, "GET /metrics HTTP/1.1\r\n\r\n")
        assert status == 200
        for reader, writer in slow:
            assert await ended(reader) == b""
            writer.close()
        status, _, _ = await ask(address, "GET /metrics HTTP/1.1\r\n\r\n")
        assert status == 200


async def test_one_connection_too_many_is_closed_at_once() -> None:
    async with serving() as address:
        slow = [await connect(address) for _ in range(MAX_CONNECTIONS)]
        for _, writer in slow:
            writer.write(b"GET /metrics HTTP/1.1\r\n")
        reader, writer = await connect(address)
        assert await ended(reader) == b""
        for _, each in (*slow, (reader, writer)):
            each.close()


async def test_port_in_use_is_reported() -> None:
    async with serving() as address:
        host, _, port = address.rpartition(":")
        with pytest.raises(OSError, match=f"metrics: cannot listen on {host}:{port}"):
            await start_metering("draft", host, int(port))


async def test_off_is_nothing_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    before = asyncio.all_tasks()
    metering = await start_metering("draft", "127.0.0.1", OFF)
    assert metering.registry is None
    assert metering.address == ""
    assert asyncio.all_tasks() == before
    await metering.close()

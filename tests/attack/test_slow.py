"""Slow loris: connections and calls that are opened, held, and never completed."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from galley.common.config.settings import ServerLimits
from galley.common.server.server import start_server
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.attack.floods import CLIENT_HELLO, KEY, connections_until, idle_connections, idle_streams
from tests.attack.stack import MIB, Attacked, hello, undisturbed, unharmed
from tests.fakes import echo_service as service
from tests.fakes.certificates import Authority, mounted
from tests.fakes.http2 import (
    INITIAL_WINDOW_SIZE,
    PREFACE,
    Kind,
    Wire,
    frame,
    head,
    message,
    opening,
    settings,
    wire,
)
from tests.fakes.tls_servers import open_to, request, tls_settings
from tests.fakes.waiting import PATIENCE_S

GENERATE = "/galley.v1.Generation/Generate"


@pytest.mark.parametrize("tls", [False, True], ids=["plain text", "TLS"])
async def test_connection_without_handshake_is_closed_in_time_and_blocks_no_other(
    tls: bool, tmp_path: Path
) -> None:
    authority = Authority(tmp_path, "authority")
    files = mounted(tmp_path / "files", authority.ca, authority.issue("server"))
    given = service.settings(**(tls_settings(files, mutual=True) if tls else {}))
    running = await start_server(
        given, service.building(service.EchoService()), limits=ServerLimits(handshake_timeout_s=0.3)
    )
    handshake = CLIENT_HELLO if tls else PREFACE + settings()
    try:
        async with AsyncExitStack() as opened:
            wires = [await opened.enter_async_context(wire(running.address)) for _ in range(20)]
            dripping = [asyncio.create_task(_drip(attacker, handshake)) for attacker in wires[:10]]
            for size, attacker in enumerate(wires[10:]):
                await attacker.send(handshake[: 3 * size])
            ended = asyncio.gather(*(attacker.ends() for attacker in wires))
            async with asyncio.timeout(PATIENCE_S), open_to(running, files if tls else None) as channel:
                await _call_until(ended, rpc.DraftStub(channel))
            for task in dripping:
                task.cancel()
            await asyncio.gather(*dripping, return_exceptions=True)
    finally:
        await running.stop()


async def _call_until(ended: asyncio.Future[Any], stub: rpc.DraftAsyncStub) -> None:
    """Make calls, and use one stream, until the connections of the attackers have ended."""
    stream = stub.ProposeStream()
    while True:
        has_ended = ended.done()
        assert len((await stub.Propose(request())).answers) == 1
        await stream.write(pb.ProposeStreamRequest(items=request().items))
        response = await stream.read()
        assert isinstance(response, pb.ProposeStreamResponse)
        assert len(response.answers) == 1
        if has_ended:
            break
        await asyncio.wait([ended], timeout=0.02)
    await ended
    await stream.done_writing()


async def _drip(attacker: Wire, data: bytes) -> None:
    for byte in data:
        if not await attacker.send(bytes([byte])):
            return
        await asyncio.sleep(0.05)


async def test_calls_without_a_request_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack), AsyncExitStack() as opened:
        block, data = head(GENERATE, KEY), message(hello().SerializeToString())
        for _ in range(20):
            attacker = await opened.enter_async_context(wire(stack.gateway))
            await attacker.begin()
            await attacker.send(*(opening(stream, GENERATE, KEY) for stream in range(1, 40, 2)))
            for byte in data[:-1]:
                await attacker.send(*(frame(Kind.DATA, 0, s, bytes([byte])) for s in range(1, 40, 2)))
            await attacker.send(frame(Kind.HEADERS, 0, 41, block[:1]))
            for byte in block[1:-1]:
                await attacker.send(frame(Kind.CONTINUATION, 0, 41, bytes([byte])))
        async with undisturbed(stack):
            pass


async def test_unauthenticated_call_is_refused_before_its_request(stack: Attacked) -> None:
    async with unharmed(stack), wire(stack.gateway) as attacker:
        await attacker.begin()
        for stream, brought in (
            (1, ()),
            (3, (("x-api-key", "none"),)),
            (5, (("authorization", "Bearer x"),)),
        ):
            await attacker.send(opening(stream, GENERATE, brought))
            assert await attacker.status(stream) == "16"


async def test_unread_answers_end_and_block_no_other(stack: Attacked) -> None:
    async with unharmed(stack), wire(stack.gateway) as attacker:
        await attacker.begin((INITIAL_WINDOW_SIZE, 0))
        request = hello()
        request.max_tokens = 400
        for stream in range(1, 21, 2):
            last = frame(Kind.DATA, 1, stream, message(request.SerializeToString()))
            await attacker.send(opening(stream, GENERATE, KEY), last)
        await attacker.until(lambda received: len(received.heads) == 10)
        assert await stack.after_sessions(1) <= 1, "but for the bystander's"


async def test_idle_streams_take_bounded_memory_and_block_no_other(stack: Attacked) -> None:
    """Open 2,000 streams; `make prove-attacks` opens 10,000."""
    stack.forget_peak()
    # All calls that a connection opens at once begin in one turn of the event loop.
    async with unharmed(stack, most_held_s=1) as before, AsyncExitStack() as opened:
        wires = await idle_streams(stack, opened, before, 1_800)
        async with undisturbed(stack):
            pass
        assert not any(attacker.received.ended for attacker in wires)
    assert stack.peak_rss() - before.rss < 200 * MIB


async def test_idle_connections_take_bounded_memory_and_block_no_other(stack: Attacked) -> None:
    """Open 1,000 connections; `make prove-attacks` opens 10,000."""
    stack.forget_peak()
    async with unharmed(stack) as before, AsyncExitStack() as opened:
        count = await idle_connections(stack, opened, 1_000)
        state = await stack.state()
        assert state.connections - before.connections >= count
        async with undisturbed(stack):
            pass
    assert stack.peak_rss() - before.rss < 100 * MIB


async def test_open_connections_work_without_file_descriptors(stack: Attacked) -> None:
    """Take all file descriptors of the process; new callers wait until it has some again."""
    async with unharmed(stack), undisturbed(stack) as bystander, AsyncExitStack() as opened:
        with stack.out_of_files(spare=4) as is_exhausted:
            await connections_until(is_exhausted, stack, opened)
            await bystander.progress()
            assert is_exhausted()
        async with undisturbed(stack):
            pass

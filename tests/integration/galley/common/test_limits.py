"""What a server lets its peers have: each limit holds, and whoever keeps to it does not notice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from galley.common.config.settings import ServerLimits
from galley.common.server.acceptors import ACCEPTORS
from galley.common.server.interceptors import MAX_OPEN_CALLS
from galley.common.server.listen import server_options
from galley.common.server.server import RunningServer, start_server
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes import http2
from tests.fakes.echo_service import SERVICE, EchoService, building, settings
from tests.fakes.http2 import END_STREAM, Kind, frame, message, opening, wire

PROPOSE, CHECK, WATCH = f"/{SERVICE}/Propose", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
PATIENCE_S = 10.0
_MANY_CONNECTIONS = 160


class Counting(EchoService):
    def __init__(self) -> None:
        super().__init__()
        self.open = 0
        self.came = asyncio.Condition()
        self.peers: list[str] = []

    async def Propose(self, request: pb.ProposeRequest, context: Any) -> pb.ProposeResponse:
        self.peers.append(context.peer())
        async with self.came:
            self.open += 1
            self.came.notify_all()
        try:
            return await super().Propose(request, context)
        finally:
            self.open -= 1

    async def has_begun(self, calls: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.came:
            await self.came.wait_for(lambda: len(self.peers) >= calls)

    async def has_open(self, calls: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.came:
            await self.came.wait_for(lambda: self.open >= calls)


@asynccontextmanager
async def serving(service: EchoService | None = None, **limits: Any) -> AsyncIterator[RunningServer]:
    given = settings(reflection=limits.pop("reflection", True))
    running = await start_server(
        given, building(service or EchoService()), limits=replace(given.server_limits(), **limits)
    )
    try:
        yield running
    finally:
        async with asyncio.timeout(PATIENCE_S):
            await running.stop()


def ask(channel: grpc.aio.Channel, **options: Any) -> Any:
    request = pb.ProposeRequest(items=[pb.ProposeItem(slice=pb.SessionSlice(session_id="s"))])
    return rpc.DraftStub(channel).Propose(request, **options)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
    return raised.value


def test_every_option_is_one_that_grpc_knows() -> None:
    result = find_spec("grpc._cython.cygrpc")
    assert result is not None
    assert result.origin is not None
    library = Path(result.origin).read_bytes()
    reported = server_options(ServerLimits(max_connection_age_s=1, max_connection_idle_s=1))
    assert len(reported) == 18
    assert [name for name, _ in reported if name.encode() + b"\0" not in library] == []


async def test_metadata_is_bounded() -> None:
    async with (
        serving(max_metadata_bytes=2048) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        await ask(channel, metadata=(("x-small", "a" * 1000),))
        for metadata in ((("x-large", "a" * 2048),), tuple((f"x-{n}", "a") for n in range(100))):
            refused = await failure(ask(channel, metadata=metadata))
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await ask(channel)


async def test_more_calls_than_a_connection_may_have_wait() -> None:
    service = Counting()
    service.release.clear()
    async with (
        serving(service, max_concurrent_rpcs=2) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        calls = [asyncio.ensure_future(_answer(ask(channel))) for _ in range(3)]
        await service.has_open(2)
        async with grpc.aio.insecure_channel(running.address, options=[("galley.test", 1)]) as other:
            await health_pb2_grpc.HealthStub(other).Check(health_pb2.HealthCheckRequest())
        assert service.open == 2
        service.release.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*calls)


async def _answer(call: Any) -> Any:
    return await call


async def test_more_connections_than_there_may_be_are_closed() -> None:
    async with (
        serving(max_connections=ACCEPTORS) as running,
        grpc.aio.insecure_channel(running.address) as channel,
        AsyncExitStack() as opened,
    ):
        await ask(channel)
        open_ones = 1
        for _ in range(_MANY_CONNECTIONS):
            peer = await opened.enter_async_context(wire(running.address))
            await peer.begin()
            open_ones += await peer.alive()
        assert open_ones == ACCEPTORS
        await ask(channel)


async def test_a_burst_of_calls_of_one_connection_keeps_no_others_waiting() -> None:
    """The kernel may give others the same acceptor, but hardly 13 of 15."""
    service = Counting()
    async with serving(service) as running, AsyncExitStack() as opened:

        async def connected(number: int) -> grpc.aio.Channel:
            options = [("galley.test", number)]  # channels with the same options share a connection
            channel = grpc.aio.insecure_channel(running.address, options=options)
            await ask(await opened.enter_async_context(channel))
            return channel

        busy, *others = [await connected(number) for number in range(16)]
        name, *names = service.peers
        service.peers.clear()
        burst = [asyncio.ensure_future(_answer(ask(busy))) for _ in range(400)]
        await service.has_begun(1)
        await asyncio.gather(*(_answer(ask(channel)) for channel in others))
        await asyncio.gather(*burst)
    waited = [service.peers[: service.peers.index(other)].count(name) for other in names]
    assert sorted(waited)[2] < 3 * len(burst) / 4


async def test_ping_flood_is_refused() -> None:
    async with serving() as running, wire(running.address) as flood:
        await flood.begin()
        # At once: data sent after the server closed makes the system drop its last frame.
        await flood.send(frame(Kind.PING, payload=b"pingping") * 200)
        await flood.ends()
        assert flood.received.goaway == http2.ENHANCE_YOUR_CALM


async def test_pings_no_closer_than_allowed_are_answered() -> None:
    async with serving(min_ping_interval_s=0.0) as running, wire(running.address) as peer:
        await peer.begin()
        for _ in range(150):
            assert await peer.alive()


@pytest.mark.parametrize("words", [b"", b"GET / HTTP/1.1\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_a_connection_that_does_not_become_one_is_closed(words: bytes) -> None:
    async with serving(handshake_timeout_s=0.3) as running, wire(running.address) as silent:
        await silent.send(words)
        await silent.ends()


async def test_idle_connection_is_closed() -> None:
    async with serving(max_connection_idle_s=0.2) as running, wire(running.address) as idle:
        await idle.begin()
        await idle.until(lambda received: received.goaway is not None)


async def test_an_old_connection_takes_no_more_calls_and_its_streams_go_on() -> None:
    service = Counting()
    async with (
        serving(service, max_connection_age_s=0.2) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        stream = rpc.DraftStub(channel).ProposeStream()
        async with asyncio.timeout(PATIENCE_S):
            while len(set(service.peers)) < 4:
                await ask(channel)
        item = pb.ProposeItem(slice=pb.SessionSlice(session_id="kept"))
        await stream.write(pb.ProposeStreamRequest(items=[item]))
        answer: Any = await stream.read()
        assert answer.answers[0].session_id == "kept"
        await stream.done_writing()
        assert await stream.code() is grpc.StatusCode.OK


async def test_a_request_that_does_not_come_ends_its_call() -> None:
    async with (
        serving(request_timeout_s=0.2) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        late = await failure(channel.stream_unary(PROPOSE)())
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "0.2 s" in (late.details() or "")
        watching: Any = channel.stream_stream(WATCH)()
        assert await watching.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_call_without_a_request_is_invalid_argument() -> None:
    async with serving() as running, grpc.aio.insecure_channel(running.address) as channel:
        empty = await failure(channel.stream_unary(PROPOSE)(iter(())))
        assert empty.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_client_that_leaves_before_its_request_gets_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as running:
        async with wire(running.address) as gone:
            await gone.begin()
            for stream in range(1, 41, 2):
                await gone.send(opening(stream, PROPOSE), http2.reset(stream) if stream % 4 == 1 else b"")
            await gone.alive()
        async with grpc.aio.insecure_channel(running.address) as channel:
            await ask(channel)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_health_is_bounded_for_each_kind_of_call() -> None:
    async with serving() as running, grpc.aio.insecure_channel(running.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        watches = [health.Watch(request) for _ in range(MAX_OPEN_CALLS)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        refused = health.Watch(request)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        statuses = (await health.List(health_pb2.HealthListRequest())).statuses
        assert set(statuses) == {"", SERVICE}
        watches[0].cancel()
        again = health.Watch(request)
        while await again.read() is grpc.aio.EOF:
            again = health.Watch(request)
        unknown = health_pb2.HealthCheckRequest(service="none")
        assert (await failure(health.Check(unknown))).code() is grpc.StatusCode.NOT_FOUND
        watches[1].cancel()
        status = (await health.Watch(unknown).read()).status
        assert status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@pytest.mark.parametrize(
    ("path", "data", "problem"),
    [
        (CHECK, b"\x0a\x05ab", "well-formed"),
        (CHECK, b"\x0a\x01\xff", "UTF-8"),
        (CHECK, b"\x0a\xdc\x0b" + b"x" * 1500, "at most 1024 bytes"),
        (WATCH, b"\xff\xff", "well-formed"),
        (REFLECT, b"\x0a\x01\xff", "UTF-8"),
        (REFLECT, b"\x22\xdc\x0b" + b"x" * 1500, "at most 1024 bytes"),
    ],
)
async def test_unreadable_standard_requests_are_invalid(path: str, data: bytes, problem: str) -> None:
    async with serving() as running, grpc.aio.insecure_channel(running.address) as channel:
        kinds: Any = {CHECK: channel.unary_unary, WATCH: channel.unary_stream, REFLECT: channel.stream_stream}
        call = kinds[path](path)(iter([data]) if path == REFLECT else data)
        error = await failure(call if path == CHECK else call.read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert problem in (error.details() or "")


async def test_unread_watch_does_not_block_server_stop() -> None:
    async with serving() as running, wire(running.address) as deaf:
        await deaf.begin((http2.INITIAL_WINDOW_SIZE, 0))
        await deaf.send(opening(1, WATCH), frame(Kind.DATA, END_STREAM, 1, message(b"")))
        await deaf.until(lambda received: 1 in received.heads)
        async with grpc.aio.insecure_channel(running.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            stopping = asyncio.ensure_future(running.stop())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            async with asyncio.timeout(PATIENCE_S):
                await stopping


async def test_reflection_can_be_switched_off() -> None:
    async with serving(reflection=False) as running, grpc.aio.insecure_channel(running.address) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        assert await listing.code() is grpc.StatusCode.UNIMPLEMENTED

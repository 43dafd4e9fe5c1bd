"""The port that tells health and nothing else, in plain text, for probes that know no TLS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from galley.common.config.settings import ServerLimits
from galley.common.server.health import MAX_CONNECTIONS
from galley.common.server.healthcheck import problem_of
from galley.common.server.server import Parts, RunningServer, start_server
from galley.common.sockets import CannotBind
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from galley.stack.ports import free_ports
from tests.fakes.certificates import Authority, Mounted, mounted
from tests.fakes.echo_service import SERVICE, EchoService, building, settings
from tests.fakes.http2 import wire
from tests.fakes.tls_servers import request, tls_settings

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def files(tmp_path: Path) -> Mounted:
    authority = Authority(tmp_path, "authority")
    return mounted(tmp_path / "server", authority.ca, authority.issue("server"))


@asynccontextmanager
async def probing(address: str) -> AsyncIterator[health_pb2_grpc.HealthAsyncStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def status_of(health: health_pb2_grpc.HealthAsyncStub, name: str = "") -> int:
    answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
    return int(answer.status)


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code()


@pytest.fixture
async def running(files: Mounted) -> AsyncIterator[RunningServer]:
    given = settings(health_port=0, **tls_settings(files, mutual=True))
    running = await start_server(given, building(EchoService()))
    yield running
    await running.stop()


async def test_it_tells_the_health_of_a_server_that_speaks_tls(running: RunningServer) -> None:
    async with probing(running.health_address) as health:
        for name in ("", SERVICE):
            assert await status_of(health, name) == SERVING
        assert await code_of(status_of(health, "unknown")) is grpc.StatusCode.NOT_FOUND
    assert await asyncio.to_thread(problem_of, running.health_address) is None
    assert "UNAVAILABLE" in str(await asyncio.to_thread(problem_of, running.address))


async def test_it_serves_nothing_else(running: RunningServer) -> None:
    async with grpc.aio.insecure_channel(running.health_address) as channel:
        draft = rpc.DraftStub(channel)
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = reflection.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        for call in (draft.Propose(request()), listing.read(), watch.read()):
            assert await code_of(call) is grpc.StatusCode.UNIMPLEMENTED


async def test_missing_health_request_times_out() -> None:
    running = await start_server(
        settings(health_port=0), building(EchoService()), limits=ServerLimits(request_timeout_s=0.2)
    )
    async with grpc.aio.insecure_channel(running.health_address) as channel:
        silent: Any = channel.stream_unary("/grpc.health.v1.Health/Check")()
        assert await code_of(silent) is grpc.StatusCode.DEADLINE_EXCEEDED
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    await running.stop()


async def test_unreadable_request_is_invalid_and_not_logged(
    running: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc.aio.insecure_channel(running.health_address) as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await code_of(check(b"\xff")) is grpc.StatusCode.INVALID_ARGUMENT
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_excess_connections_are_refused_and_port_recovers(running: RunningServer) -> None:
    async with AsyncExitStack() as opened:
        crowd = [
            await opened.enter_async_context(wire(running.health_address)) for _ in range(MAX_CONNECTIONS)
        ]
        for one in crowd:
            await one.begin()
            assert not one.received.ended
        async with wire(running.health_address) as late:
            await late.begin()
            await late.ends()
        assert await asyncio.to_thread(problem_of, running.health_address) is not None
    async with probing(running.health_address) as health:
        response = await health.Check(health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True)
        assert response.status == SERVING


async def test_it_says_that_a_server_starts_and_that_it_drains(files: Mounted) -> None:
    built, service = asyncio.Event(), EchoService()

    async def build(server: grpc.aio.Server, parts: Parts) -> EchoService:
        await built.wait()
        rpc.add_DraftServicer_to_server(service, server)
        return service

    port = free_ports(1)[0]
    given = settings(health_port=port, **tls_settings(files, mutual=True))
    starting = asyncio.create_task(start_server(given, build))
    async with probing(f"127.0.0.1:{port}") as health:
        response = await health.Check(health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True)
        assert response.status == NOT_SERVING
        built.set()
        running = await starting
        assert running.health_address == f"127.0.0.1:{port}"
        assert await status_of(health, SERVICE) == SERVING
        service.release.clear()
        stopping = asyncio.create_task(running.stop())
        await asyncio.sleep(0)
        assert await status_of(health, SERVICE) == NOT_SERVING
        service.release.set()
        await stopping
        assert await code_of(status_of(health)) is grpc.StatusCode.UNAVAILABLE


async def test_port_in_use_is_reported_at_once(running: RunningServer) -> None:
    port = int(running.health_address.rpartition(":")[2])
    with pytest.raises(CannotBind, match=str(port)):
        await start_server(settings(health_port=port), building(EchoService()))


async def test_there_is_none_unless_it_is_asked_for() -> None:
    running = await start_server(settings(), building(EchoService()))
    assert running.health_address == ""
    await running.stop()

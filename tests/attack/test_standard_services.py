"""Health and reflection, which are open to everyone, refuse what cannot be read as all others do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from galley.common.server.server import RunningServer, start_server
from galley.common.wire.status import describe
from tests.fakes.echo_service import EchoService, building, settings
from tests.fakes.waiting import PATIENCE_S

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
async def server() -> AsyncIterator[RunningServer]:
    running = await start_server(settings(), building(EchoService()))
    yield running
    async with asyncio.timeout(PATIENCE_S):
        await running.stop()


@pytest.fixture
async def channel(server: RunningServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


async def status_of(call: Any) -> Any:
    with pytest.raises(grpc.RpcError) as raised:
        async with asyncio.timeout(PATIENCE_S):
            await (call.read() if hasattr(call, "read") else call)
    return describe(raised.value)


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
async def test_what_cannot_be_read_is_the_callers_fault(
    channel: grpc.aio.Channel, path: str, data: bytes, problem: str
) -> None:
    call: Any
    if path == REFLECT:
        stream: Any = channel.stream_stream(path)
        call = stream(iter([data]))
    else:
        kind: Any = channel.unary_stream if path == WATCH else channel.unary_unary
        call = kind(path)(data)
    told = await status_of(call)
    assert told.code is grpc.StatusCode.INVALID_ARGUMENT
    assert problem in told.message


async def test_a_service_that_is_not_there(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    asked = health_pb2.HealthCheckRequest(service="none")
    assert (await status_of(stub.Check(asked))).code is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(asked)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    listed = await stub.List(health_pb2.HealthListRequest())
    assert {name: told.status for name, told in listed.statuses.items()} == {
        "": SERVING,
        "galley.v1.Draft": SERVING,
    }

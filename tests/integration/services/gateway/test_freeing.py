"""What an ended stream held is freed at once: its tokens must not wait for a garbage collection."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any, cast

import grpc
import pytest

from galley.core.errors import Overloaded
from tests.fakes.http_client import BODY, Events, http_client
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import Gateway, World, receive, refused
from tests.integration.services.gateway.test_unread import SHORT, left_unread


@pytest.fixture(autouse=True)
def no_collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("services.gateway.service._COLLECT_S", 1e6)
    gc.disable()
    yield
    gc.enable()


def running_session(gateway: Gateway) -> weakref.ref[Any]:
    [runner] = cast("Any", gateway.running.service)._streams._running
    return weakref.ref(runner.session)


async def freed(session: weakref.ref[Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while session() is not None:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.01)


def refusals() -> list[Overloaded]:
    return [found for found in gc.get_objects() if issubclass(type(found), Overloaded)]


async def test_a_stream_of_grpc_is_freed(world: World) -> None:
    gateway = await world.gateway()
    stream, received = await world.held(gateway, 2)
    session = running_session(gateway)
    world.target.gate.open()
    await received.listen(stream)
    await freed(session)


async def test_a_stream_of_http_is_freed(world: World) -> None:
    gateway = await world.gateway(http_port=0)
    world.target.gate.close_after(2)
    events = Events()
    async with http_client(gateway.http) as client:
        async with client.open("/v1/completions", BODY) as response:
            await events.listen(response, until=2)
            session = running_session(gateway)
            world.target.gate.open()
            await events.listen(response)
        await freed(session)


async def test_a_stream_that_its_client_cancels_is_freed(world: World) -> None:
    gateway = await world.gateway()
    stream, _ = await world.held(gateway, 2)
    session = running_session(gateway)
    stream.cancel()
    await freed(session)
    world.target.gate.open()


async def test_a_refused_call_is_freed(world: World) -> None:
    """gRPC keeps the error that ends a call with the call, and the error's traceback leads there."""
    of_other_tests = refusals()
    gateway = await world.gateway(max_sessions=1)
    stream, _ = await world.held(gateway, 2)
    error = await refused(receive(gateway.generate()))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with asyncio.timeout(PATIENCE_S):
        while len(refusals()) > len(of_other_tests):  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.01)
    stream.cancel()
    world.target.gate.open()


async def test_a_stream_that_ended_as_unread_is_freed(world: World) -> None:
    gateway = await world.gateway(client_timeout_s=0.5, max_sessions=1)
    async with left_unread(gateway, SHORT, 1):
        session = running_session(gateway)
        await gateway.has_places()
    await freed(session)

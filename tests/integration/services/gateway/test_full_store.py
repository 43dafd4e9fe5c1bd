"""A store whose memory or disk is full: streams pause or end `UNAVAILABLE`, and can be resumed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tests.fakes.mounts import require_mounts, small_disk
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import World, must_be_true, receive, refused

Full: TypeAlias = Callable[[Server], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def out_of_memory(store: Server) -> AsyncIterator[None]:
    await store.command("CONFIG", "SET", "maxmemory", "1")
    yield
    await store.command("CONFIG", "SET", "maxmemory", "0")


@asynccontextmanager
async def out_of_disk(store: Server) -> AsyncIterator[None]:
    """Fill the disk, and write until the store has noticed and refuses to write."""
    filler = Path(store.url.removeprefix("unix://")).parent / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
    async with store.raw() as raw, asyncio.timeout(PATIENCE_S):
        while await is_writable(raw):
            pass
    yield
    filler.unlink()


async def is_writable(raw: Redis) -> bool:
    try:
        return bool(await raw.set("noise", bytes(65536)))
    except ResponseError:  # MISCONF
        return False


@pytest.fixture(params=[out_of_memory, out_of_disk])
def full(request: pytest.FixtureRequest) -> Full:
    if request.param is out_of_disk:
        require_mounts()
    made: Full = request.param
    return made


@pytest.fixture
def own_store(full: Full) -> Iterator[Server]:
    """A store as `galley up --data-dir` starts it; on a small disk if the disk will be full."""
    with contextlib.ExitStack() as opened:
        directory = opened.enter_context(small_disk()) if full is out_of_disk else None
        yield opened.enter_context(running(VALKEY, "--appendfsync", "everysec", directory=directory))


@pytest.fixture
async def world(frail_world: World) -> World:
    return frail_world


async def test_a_full_store_is_a_pause(world: World, own_store: Server, full: Full) -> None:
    gateway = await world.gateway(draft="none", window=6)
    stream, received = await world.held(gateway, 2)
    await world.target.waits_after(2)
    async with full(own_store):
        world.target.gate.open()
        await world.target.has_answered(2 + 6)
        assert len(received.tokens) == 2
        await gateway.client.model_info(timeout_s=PATIENCE_S)
    must_be_true(await received.listen(stream))


async def test_a_store_that_stays_full_is_unavailable(world: World, own_store: Server, full: Full) -> None:
    gateway = await world.gateway(draft="none", store_timeout_s=0.2)
    stream, received = await world.held(gateway, 2)
    await world.target.waits_after(2)
    async with full(own_store):
        world.target.gate.open()
        for answer in (received.listen(stream), receive(gateway.generate())):
            assert (await refused(answer)).code is grpc.StatusCode.UNAVAILABLE
        await gateway.client.model_info(timeout_s=PATIENCE_S)
    must_be_true(await received.listen(gateway.client.resume_stream(stream)))

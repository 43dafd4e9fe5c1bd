"""The log comes first: nothing is streamed that it does not hold, and it may be away for a while."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.fakes.redis_servers import Server
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, Gateway, Heard, World, any_credit, hear, must_be_true, refused

QUIET_S = 0.2
"""How long nothing may happen, where nothing must."""


@pytest.fixture
async def world(frail_world: World) -> World:
    """The world of all tests here: they kill its store."""
    return frail_world


@any_credit
async def test_nothing_is_streamed_before_it_is_logged(world: World, own_store: Server) -> None:
    window = 6
    gateway = await world.gateway(window=window, draft="none")
    world.target.gate.close()
    stream = gateway.ask()
    heard = Heard()
    heard.hear(await anext(stream))
    await world.target.called(1)

    own_store.pause()
    world.target.gate.open()
    await world.target.has_answered(window)
    chunk = asyncio.ensure_future(anext(stream))
    await asyncio.wait({chunk}, timeout=QUIET_S)
    assert not chunk.done(), "streamed what the log cannot hold"
    assert world.target.answered == window, "worked on beyond the window"

    own_store.go_on()
    heard.hear(await chunk)
    must_be_true(await heard.listen(stream))


@pytest.mark.parametrize("how", ["hangs", "dies"])
async def test_a_store_away_for_too_long_is_unavailable(world: World, own_store: Server, how: str) -> None:
    gateway = await world.gateway(store_timeout_s=0.2)
    stream, heard = await world.held(gateway, 1)
    await world.target.waits_after(1)

    own_store.pause() if how == "hangs" else own_store.kill()
    world.target.gate.open()
    error = await refused(heard.listen(stream))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "store" in error.message
    assert (await refused(hear(gateway.ask()))).code is grpc.StatusCode.UNAVAILABLE
    resumed = gateway.client.resume_stream(stream)
    assert (await refused(hear(resumed))).code is grpc.StatusCode.UNAVAILABLE

    own_store.go_on() if how == "hangs" else own_store.start()
    must_be_true(await heard.listen(gateway.client.resume_stream(stream)))


@any_credit
async def test_a_store_that_restarts_is_a_pause(world: World, gateway: Gateway, own_store: Server) -> None:
    stream, heard = await world.held(gateway, 2, until=1)
    await world.target.waits_after(2)
    own_store.kill()
    world.target.gate.open()
    await world.target.has_answered(3)
    own_store.start()
    must_be_true(await heard.listen(stream))


async def test_a_clients_deadline_comes_before_the_stores(world: World, own_store: Server) -> None:
    gateway = await world.gateway()
    world.target.gate.close()
    stream = gateway.ask(timeout_s=1.3)
    await anext(stream)
    own_store.pause()
    world.target.gate.open()
    async with asyncio.timeout(PATIENCE_S):
        error = await refused(hear(stream))
    assert error.code in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
    own_store.go_on()


@any_credit
async def test_cancelling_while_the_store_hangs_is_harmless(world: World, own_store: Server) -> None:
    """A reply that nobody waits for any more must not be taken for the next one's."""
    gateway = await world.gateway(draft="none")
    world.target.gate.close()
    stream = gateway.ask()
    await anext(stream)
    own_store.pause()
    starting = gateway.ask()
    world.target.gate.open()
    await world.target.has_answered(MAX_TOKENS)
    stream.cancel()
    starting.cancel()
    await gateway.idle()
    own_store.go_on()
    must_be_true(await hear(gateway.ask()))
    must_be_true(await hear(gateway.client.resume(stream.session_id, 0)))

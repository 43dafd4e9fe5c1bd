"""The log comes first: nothing is streamed that it lacks; it may be away, or come back rolled back."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from galley.client.client import AsyncStream
from galley.core.content import prefix_hash
from tests.fakes.link import Link
from tests.fakes.redis_servers import Server
from tests.fakes.relay import Relay
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, Gateway, Received, World, any_credit, must_be_true, receive, refused

KEPT, RECEIVED = 4, 15
"""Tokens that the store still has when it comes back, and that the client has seen."""
QUIET_S = 0.2
"""How long nothing may happen, where nothing must."""


@pytest.fixture
async def world(frail_world: World) -> World:
    return frail_world


@any_credit
async def test_nothing_is_streamed_before_it_is_logged(world: World, own_store: Server) -> None:
    window = 6
    gateway = await world.gateway(window=window, draft="none")
    world.target.gate.close()
    stream = gateway.generate()
    received = Received()
    received.receive(await anext(stream))
    await world.target.called(1)

    own_store.pause()
    world.target.gate.open()
    await world.target.has_answered(window)
    chunk = asyncio.ensure_future(anext(stream))
    await asyncio.wait({chunk}, timeout=QUIET_S)
    assert not chunk.done(), "streamed what the log cannot hold"
    assert world.target.answered == window, "worked on beyond the window"

    own_store.go_on()
    received.receive(await chunk)
    must_be_true(await received.listen(stream))


@pytest.mark.parametrize("how", ["hangs", "dies"])
async def test_a_store_away_for_too_long_is_unavailable(world: World, own_store: Server, how: str) -> None:
    gateway = await world.gateway(store_timeout_s=0.2)
    stream, received = await world.held(gateway, 1)
    await world.target.waits_after(1)

    own_store.pause() if how == "hangs" else own_store.kill()
    world.target.gate.open()
    error = await refused(received.listen(stream))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "store" in error.message
    assert (await refused(receive(gateway.generate()))).code is grpc.StatusCode.UNAVAILABLE
    resumed = gateway.client.resume_stream(stream)
    assert (await refused(receive(resumed))).code is grpc.StatusCode.UNAVAILABLE

    own_store.go_on() if how == "hangs" else own_store.start()
    must_be_true(await received.listen(gateway.client.resume_stream(stream)))


@any_credit
async def test_a_store_that_restarts_is_a_pause(world: World, gateway: Gateway, own_store: Server) -> None:
    stream, received = await world.held(gateway, 2, until=1)
    await world.target.waits_after(2)
    own_store.kill()
    world.target.gate.open()
    await world.target.has_answered(3)
    own_store.start()
    must_be_true(await received.listen(stream))


async def test_a_clients_deadline_comes_before_the_stores(world: World, own_store: Server) -> None:
    gateway = await world.gateway()
    world.target.gate.close()
    stream = gateway.generate(timeout_s=1.3)
    await anext(stream)
    own_store.pause()
    world.target.gate.open()
    async with asyncio.timeout(PATIENCE_S):
        error = await refused(receive(stream))
    assert error.code in {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}
    own_store.go_on()


@any_credit
async def test_cancelling_while_the_store_hangs_is_harmless(world: World, own_store: Server) -> None:
    gateway = await world.gateway(draft="none")
    world.target.gate.close()
    stream = gateway.generate()
    await anext(stream)
    own_store.pause()
    starting = gateway.generate()
    world.target.gate.open()
    await world.target.has_answered(MAX_TOKENS)
    stream.cancel()
    starting.cancel()
    await gateway.idle()
    own_store.go_on()
    must_be_true(await receive(gateway.generate()))
    must_be_true(await receive(gateway.client.resume(stream.session_id, 0)))


async def stream_beyond(world: World, store: Server, gateway: Gateway) -> tuple[AsyncStream, Received]:
    world.target.gate.close()
    stream = gateway.generate()
    received = Received()
    for until in (KEPT, RECEIVED):
        world.target.gate.permit(until - len(received.tokens))
        await received.listen(stream, until)
        if until == KEPT:
            store.keep()
    return stream, received


async def roll_back_unowned(store: Server, stream: AsyncStream) -> None:
    """Roll the store back, for a session whose owner stopped long before."""
    store.roll_back()
    assert await store.command("PEXPIRE", f"galley:sessions:default:{{{stream.session_id}}}", "600000") == 1


async def log_must_be_true(gateway: Gateway, stream: AsyncStream) -> None:
    must_be_true(await receive(gateway.client.resume(stream.session_id, 0)))


async def test_a_claim_that_was_given_up_takes_no_session(world: World, own_store: Server) -> None:
    """The gateway sends the claim into a cut, gives up, and the cut heals while another gateway streams."""
    link = Link()
    async with Relay(own_store.url.removeprefix("unix://"), link) as relay:
        cut_off = await world.gateway(redis_url=f"redis://{relay.address}", store_timeout_s=0.5)
        healthy = await world.gateway()
        stream, received = await world.held(healthy, 2)
        stream.cancel()
        await healthy.idle()
        link.cut()
        error = await refused(receive(cut_off.client.resume_stream(stream)))
        assert error.code is grpc.StatusCode.UNAVAILABLE
        resumed = healthy.client.resume_stream(stream)
        world.target.gate.permit(1)
        await received.listen(resumed, 3)
        link.mend()
        known = await refused(cut_off.client.abort("00" * 16))
        assert known.code is grpc.StatusCode.NOT_FOUND, "what was sent into the cut has arrived"
        world.target.gate.open()
        must_be_true(await received.listen(resumed))


@any_credit
async def test_an_owner_repairs_a_log_that_was_rolled_back(world: World, own_store: Server) -> None:
    gateway = await world.gateway(draft="none")
    stream, received = await stream_beyond(world, own_store, gateway)
    own_store.roll_back()
    answered = world.target.answered
    world.target.gate.open()
    must_be_true(await received.listen(stream))
    assert world.target.answered - answered == MAX_TOKENS - RECEIVED, "from memory, not computed again"
    await log_must_be_true(gateway, stream)
    assert world.target.answered - answered == MAX_TOKENS - RECEIVED, "all of it is in the log"


@any_credit
async def test_lost_tokens_are_computed_again_on_resume(world: World, own_store: Server) -> None:
    first, second = await world.gateway(draft="none"), await world.gateway(draft="none")
    stream, received = await stream_beyond(world, own_store, first)
    stream.cancel()
    await first.idle()
    await roll_back_unowned(own_store, stream)
    answered = world.target.answered
    resumed = second.client.resume_stream(stream)
    world.target.gate.open()
    must_be_true(await received.listen(resumed))
    assert world.target.answered - answered >= MAX_TOKENS - KEPT
    await log_must_be_true(first, resumed)


@any_credit
async def test_a_client_may_have_more_than_the_log(world: World, own_store: Server) -> None:
    first, second = await world.gateway(draft="none"), await world.gateway(draft="none")
    stream, received = await stream_beyond(world, own_store, first)
    world.target.gate.open()
    must_be_true(await received.listen(stream))
    await roll_back_unowned(own_store, stream)
    again = await receive(second.client.resume_stream(stream), first_index=MAX_TOKENS)
    assert not again.tokens
    assert again.end.reason == received.end.reason
    await log_must_be_true(first, stream)


@any_credit
async def test_recomputed_tokens_are_checked_against_the_client(world: World, own_store: Server) -> None:
    first, second = await world.gateway(draft="none"), await world.gateway(draft="none")
    stream, received = await stream_beyond(world, own_store, first)
    stream.cancel()
    await first.idle()
    await roll_back_unowned(own_store, stream)
    world.target.gate.open()
    other = [*received.tokens[: RECEIVED - 1], received.tokens[RECEIVED - 1] + 1]
    reported = Received(first_index=RECEIVED)
    error = await refused(
        reported.listen(second.client.resume(stream.session_id, RECEIVED, prefix_hash(other)))
    )
    assert error.code is grpc.StatusCode.DATA_LOSS
    assert not reported.tokens
    must_be_true(await received.listen(second.client.resume_stream(stream)))


@any_credit
async def test_an_owner_whose_claim_was_lost_is_unavailable(world: World, own_store: Server) -> None:
    first, second = await world.gateway(draft="none"), await world.gateway(draft="none")
    stream, received = await stream_beyond(world, own_store, first)
    stream.cancel()
    await world.target.was_cancelled()
    await first.idle()
    world.target.gate.permit(1)
    resumed = second.client.resume_stream(stream)
    await received.listen(resumed, RECEIVED + 1)
    await roll_back_unowned(own_store, stream)
    world.target.gate.open()
    error = await refused(received.listen(resumed))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "resume" in error.message
    must_be_true(await received.listen(second.client.resume_stream(resumed)))
    await log_must_be_true(first, stream)


class Lost:
    def __init__(self, gateway: Gateway, stream: AsyncStream, received: Received) -> None:
        self.gateway = gateway
        self.stream = stream
        self.received = received


async def about_to_be_lost(world: World, store: Server) -> Lost:
    gateway = await world.gateway(draft="none")
    must_be_true(await receive(gateway.generate()))
    store.keep()
    world.target.gate.close_after(RECEIVED)
    stream = gateway.generate(idempotency_key="key")
    return Lost(gateway, stream, await receive(stream, until=RECEIVED))


@any_credit
async def test_an_owner_recreates_its_lost_session(world: World, own_store: Server) -> None:
    lost = await about_to_be_lost(world, own_store)
    own_store.roll_back()
    answered = world.target.answered
    world.target.gate.open()
    must_be_true(await lost.received.listen(lost.stream))
    assert world.target.answered - answered == MAX_TOKENS - RECEIVED, "from memory, not computed again"
    session = f"galley:sessions:default:{{{lost.stream.session_id}}}"
    assert await own_store.command("HEXISTS", session, "target_kv_len") == 1, "the target that has its cache"
    await log_must_be_true(await world.gateway(draft="none"), lost.stream)


@any_credit
async def test_a_lost_session_without_owner_is_gone(world: World, own_store: Server) -> None:
    lost = await about_to_be_lost(world, own_store)
    lost.stream.cancel()
    await lost.gateway.idle()
    own_store.roll_back()
    world.target.gate.open()
    gone = await refused(receive(lost.gateway.client.resume_stream(lost.stream)))
    assert gone.code is grpc.StatusCode.NOT_FOUND
    must_be_true(await receive(lost.gateway.generate()))

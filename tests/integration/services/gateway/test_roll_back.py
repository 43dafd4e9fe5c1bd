"""A store that comes back without its last moments: killed, and started with an older append-only file."""

from __future__ import annotations

import grpc
import pytest

from galley.client.client import TokenStream
from galley.core.content import prefix_hash
from tests.fakes.redis_servers import Server
from tests.fakes.world import MAX_TOKENS, Gateway, Heard, World, any_credit, hear, must_be_true, refused

KEPT, HEARD = 4, 15
"""Tokens that the store still has when it comes back, and that the client has seen."""


@pytest.fixture
async def world(frail_world: World) -> World:
    """The world of all tests here: they kill its store."""
    return frail_world


async def stream_beyond(world: World, store: Server, gateway: Gateway) -> tuple[TokenStream, Heard]:
    """A stream of which the client has HEARD tokens, all logged; the store keeps KEPT of them in hand."""
    world.target.gate.close()
    stream = gateway.ask()
    heard = Heard()
    for until in (KEPT, HEARD):
        world.target.gate.permit(until - len(heard.tokens))
        await heard.listen(stream, until)
        if until == KEPT:
            store.keep()
    return stream, heard


async def log_must_be_true(gateway: Gateway, stream: TokenStream) -> None:
    must_be_true(await hear(gateway.client.resume(stream.session_id, 0)))


@any_credit
async def test_an_owner_repairs_a_log_that_was_rolled_back(world: World, own_store: Server) -> None:
    gateway = await world.gateway(draft="none")
    stream, heard = await stream_beyond(world, own_store, gateway)
    own_store.roll_back()
    answered = world.target.answered
    world.target.gate.open()
    must_be_true(await heard.listen(stream))
    assert world.target.answered - answered == MAX_TOKENS - HEARD, "from memory, not computed again"
    await log_must_be_true(gateway, stream)
    assert world.target.answered - answered == MAX_TOKENS - HEARD, "all of it is in the log"


@any_credit
async def test_lost_tokens_are_computed_again_on_resume(world: World, own_store: Server) -> None:
    first, second = await world.gateway(draft="none"), await world.gateway(draft="none")
    stream, heard = await stream_beyond(world, own_store, first)
    stream.cancel()
    await first.idle()
    own_store.roll_back()
    answered = world.target.answered
    resumed = second.client.resume_stream(stream)
    world.target.gate.open()
    must_be_true(await heard.listen(resumed))
    # An item that was given up may still have passed the gate.
    assert world.target.answered - answered >= MAX_TOKENS - KEPT
    await log_must_be_true(first, resumed)


@any_credit
async def test_a_client_may_have_more_than_the_log(world: World, own_store: Server) -> None:
    """Of a session that had ended too: it is live again, and ends again."""
    first, second = await world.gateway(draft="none"), await world.gateway(draft="none")
    stream, heard = await stream_beyond(world, own_store, first)
    world.target.gate.open()
    must_be_true(await heard.listen(stream))
    own_store.roll_back()
    again = await hear(second.client.resume_stream(stream), first_index=MAX_TOKENS)
    assert not again.tokens
    assert again.end.reason == heard.end.reason
    await log_must_be_true(first, stream)


@any_credit
async def test_recomputed_tokens_are_checked_against_the_client(world: World, own_store: Server) -> None:
    first, second = await world.gateway(draft="none"), await world.gateway(draft="none")
    stream, heard = await stream_beyond(world, own_store, first)
    stream.cancel()
    await first.idle()
    own_store.roll_back()
    world.target.gate.open()
    other = [*heard.tokens[: HEARD - 1], heard.tokens[HEARD - 1] + 1]
    told = Heard(first_index=HEARD)
    error = await refused(told.listen(second.client.resume(stream.session_id, HEARD, prefix_hash(other))))
    assert error.code is grpc.StatusCode.DATA_LOSS
    assert not told.tokens
    must_be_true(await heard.listen(second.client.resume_stream(stream)))


@any_credit
async def test_an_owner_whose_claim_was_lost_is_unavailable(world: World, own_store: Server) -> None:
    """Nobody has it: the client is to resume, and does."""
    first, second = await world.gateway(draft="none"), await world.gateway(draft="none")
    stream, heard = await stream_beyond(world, own_store, first)
    stream.cancel()
    await world.target.was_given_up()
    await first.idle()
    world.target.gate.permit(1)
    resumed = second.client.resume_stream(stream)
    await heard.listen(resumed, HEARD + 1)
    own_store.roll_back()  # to the first gateway's time
    world.target.gate.open()
    error = await refused(heard.listen(resumed))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "resume" in error.message
    must_be_true(await heard.listen(second.client.resume_stream(resumed)))
    await log_must_be_true(first, stream)


class Lost:
    """A stream of HEARD tokens, of whose session the store is about to lose all."""

    def __init__(self, gateway: Gateway, stream: TokenStream, heard: Heard) -> None:
        self.gateway = gateway
        self.stream = stream
        self.heard = heard


async def about_to_be_lost(world: World, store: Server) -> Lost:
    gateway = await world.gateway(draft="none")
    must_be_true(await hear(gateway.ask()))
    store.keep()
    world.target.gate.close_after(HEARD)
    stream = gateway.ask(idempotency_key="key")
    return Lost(gateway, stream, await hear(stream, until=HEARD))


@any_credit
async def test_an_owner_recreates_its_lost_session(world: World, own_store: Server) -> None:
    lost = await about_to_be_lost(world, own_store)
    own_store.roll_back()
    answered = world.target.answered
    world.target.gate.open()
    must_be_true(await lost.heard.listen(lost.stream))
    assert world.target.answered - answered == MAX_TOKENS - HEARD, "from memory, not computed again"
    await log_must_be_true(await world.gateway(draft="none"), lost.stream)


@any_credit
async def test_a_lost_session_without_owner_is_gone(world: World, own_store: Server) -> None:
    lost = await about_to_be_lost(world, own_store)
    lost.stream.cancel()
    await lost.gateway.idle()
    own_store.roll_back()
    world.target.gate.open()
    gone = await refused(hear(lost.gateway.client.resume_stream(lost.stream)))
    assert gone.code is grpc.StatusCode.NOT_FOUND
    must_be_true(await hear(lost.gateway.ask()))

"""Gateways that go away under a client that knows another: what it hears is one stream."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc
import pytest

from galley.client.client import AsyncClient, AsyncStream
from galley.client.options import Retries
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.truth import SEED
from tests.fakes.world import (
    MAX_TOKENS,
    PROMPT,
    Gateway,
    Received,
    World,
    any_credit,
    must_be_true,
    receive,
    refused,
)

STREAMS = 4
SOON = Retries(patience_s=10.0, first_pause_s=0.01)


def client_of(*gateways: Gateway) -> AsyncClient:
    return AsyncClient([gateway.address for gateway in gateways], retries=SOON)


def ask(client: AsyncClient) -> AsyncStream:
    return client.stream(PROMPT, max_tokens=MAX_TOKENS, seed=SEED, ignore_eos=True, logprobs=2)


@any_credit
@pytest.mark.parametrize("drain_timeout_s", [0.1, 1.0], ids=["cut off", "handed over"])
async def test_a_gateway_that_stops_is_a_pause(world: World, drain_timeout_s: float) -> None:
    leaving, staying = await world.gateway(drain_timeout_s=drain_timeout_s), await world.gateway()
    world.draft.spoil_rate = 0.5
    async with client_of(staying) as client:
        whole = await receive(ask(client))
    must_be_true(whole)
    world.target.pass_s = 0.05
    async with client_of(leaving, staying) as client:
        streams = [ask(client) for _ in range(STREAMS)]
        received = await asyncio.gather(*(receive(stream, until=1) for stream in streams))
        stopping = asyncio.create_task(leaving.running.stop())
        await asyncio.gather(*(one.listen(stream) for one, stream in zip(received, streams, strict=True)))
        await stopping
    for one in received:
        must_be_true(one)
        assert one.logprobs == whole.logprobs
        assert not one.changes


async def test_a_stream_survives_gateways_that_stop_in_turn(world: World) -> None:
    gateways = [await world.gateway(drain_timeout_s=0.1) for _ in range(4)]
    world.target.gate.close()
    async with client_of(*gateways) as client:
        stream = ask(client)
        received = Received()
        for count, gateway in enumerate(gateways[:-1], start=1):
            world.target.gate.permit(1)
            await received.listen(stream, until=count)
            await gateway.running.stop()
        world.target.gate.open()
        must_be_true(await received.listen(stream))


async def test_a_superseded_client_does_not_retry(world: World) -> None:
    first, second = await world.gateway(), await world.gateway()
    world.target.gate.close()
    async with AsyncExitStack() as opened:
        one = await opened.enter_async_context(client_of(first, second))
        other = await opened.enter_async_context(client_of(second, first))
        stream = ask(one)
        world.target.gate.permit(1)
        received = await receive(stream, until=1)
        taken = other.resume_stream(stream)
        hearing = asyncio.ensure_future(receive(taken, first_index=len(received.tokens)))
        await world.target.waits_after(1)
        world.target.gate.open()
        error = await refused(received.listen(stream))
        assert error.code is grpc.StatusCode.FAILED_PRECONDITION
        assert "claimed by another owner" in error.message
        rest = await hearing
        assert rest.end.reason == pb.Finished.REASON_LENGTH


async def test_a_repeated_request_joins_its_first_try(world: World) -> None:
    doomed, staying = await world.gateway(drain_timeout_s=0.1), await world.gateway()
    world.target.gate.close()
    async with client_of(doomed, staying) as client:
        stream = ask(client)
        hearing = asyncio.ensure_future(receive(stream))
        await world.target.called(1)
        await doomed.running.stop()
        world.target.gate.open()
        must_be_true(await hearing)
    assert len({call.slice.session_id for call in world.target.calls}) == 1

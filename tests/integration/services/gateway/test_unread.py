"""Clients that do not read what they are sent: they harm nobody, and lose nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from galley.client.client import AsyncStream
from galley.client.request import generate_request
from tests.fakes.narrow_client import narrow
from tests.fakes.truth import SEED, true_output
from tests.fakes.world import (
    PROMPT,
    PROMPT_TOKENS,
    Gateway,
    Received,
    World,
    any_credit,
    must_be_true,
    receive,
    refused,
)

STREAMS = 4
BUFFER = 32
LONG = 50_000
# More than a client's transport buffers, and less than a session may be ahead of its client.
SHORT = 900


@asynccontextmanager
async def left_unread(gateway: Gateway, max_tokens: int, count: int) -> AsyncIterator[list[AsyncStream]]:
    options = {"max_tokens": max_tokens, "seed": SEED, "ignore_eos": True, "logprobs": 20}
    async with narrow(gateway.address) as stub:
        streams = [AsyncStream(stub.Generate(generate_request(PROMPT, options))) for _ in range(count)]
        for stream in streams:
            assert (await anext(stream)).HasField("started")
        yield streams


async def held_up(world: World, gateway: Gateway, stream: AsyncStream) -> int:
    before = -1
    while before != (before := world.target.confirmed[stream.session_id]):
        must_be_true(await receive(gateway.generate()))
    return before


@any_credit
async def test_unread_streams_end_and_stay_resumable(world: World) -> None:
    gateway = await world.gateway(client_timeout_s=1, buffer=BUFFER, max_sessions=STREAMS)
    other = await world.gateway()
    async with left_unread(gateway, LONG, STREAMS) as streams:
        await gateway.has_places()
        confirmed = dict(world.target.confirmed)
        for _ in range(STREAMS):
            must_be_true(await receive(gateway.generate()))
        assert {session_id: world.target.confirmed[session_id] for session_id in confirmed} == confirmed
        for stream in streams:
            received = Received()
            error = await refused(received.listen(stream))
            assert error.code is grpc.StatusCode.UNAVAILABLE
            assert "left unread for 1 s; resume" in error.message
            enough = len(received.tokens) + 3 * BUFFER
            resumed = other.client.resume_stream(stream)
            await received.listen(resumed, until=enough)
            assert received.tokens[:enough] == true_output(PROMPT_TOKENS, enough)
            resumed.cancel()


@any_credit
async def test_an_unread_finished_answer_frees_its_place(world: World) -> None:
    gateway = await world.gateway(client_timeout_s=2, max_sessions=1)
    async with left_unread(gateway, SHORT, 1) as [stream]:
        await gateway.has_places()
        assert world.target.confirmed[stream.session_id] == SHORT, "it was worked on to its end"
        must_be_true(await receive(gateway.generate()))
        received = Received()
        error = await refused(received.listen(stream))
        assert error.code is grpc.StatusCode.UNAVAILABLE
        call_count = len(world.target.calls)
        must_be_true(await received.listen(gateway.client.resume_stream(stream)), SHORT)
        assert len(world.target.calls) == call_count


@any_credit
async def test_a_slow_client_that_reads_in_time_loses_nothing(world: World) -> None:
    gateway = await world.gateway(client_timeout_s=20, buffer=BUFFER)
    async with left_unread(gateway, SHORT, 1) as [stream]:
        assert await held_up(world, gateway, stream) < SHORT
        must_be_true(await receive(stream), SHORT)


@pytest.mark.parametrize(
    ("fate", "code"),
    [("claimed", grpc.StatusCode.FAILED_PRECONDITION), ("aborted", grpc.StatusCode.UNAVAILABLE)],
)
async def test_the_end_of_a_session_ends_its_unread_stream(
    world: World, fate: str, code: grpc.StatusCode
) -> None:
    gateway = await world.gateway(client_timeout_s=3, buffer=BUFFER, max_sessions=2)
    async with left_unread(gateway, LONG, 1) as [stream]:
        await held_up(world, gateway, stream)
        if fate == "claimed":
            resumed = gateway.client.resume(stream.session_id, 0)
            await receive(resumed, until=1)
            resumed.cancel()
        else:
            await gateway.client.abort(stream.session_id)
        await gateway.has_places()
        assert (await refused(receive(stream))).code is code

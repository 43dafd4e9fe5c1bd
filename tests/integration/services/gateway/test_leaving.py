"""Clients that go, are slow, or end their session; gateways that go."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from galley.client.client import NO_RETRIES, AsyncClient, AsyncStream, GalleyRpcError
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.truth import SEED, true_output
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import (
    MAX_TOKENS,
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

LONG = 50_000


@any_credit
async def test_a_cancelled_stream_stops_the_target(world: World, gateway: Gateway) -> None:
    stream, received = await world.held(gateway, 1)
    await world.target.waits_after(1)
    call_count = len(world.target.calls)
    stream.cancel()
    await world.target.was_cancelled()
    await gateway.idle()
    assert len(world.target.calls) == call_count
    assert world.target.answered == 1

    world.target.gate.open()
    must_be_true(await received.listen(gateway.client.resume_stream(stream)))


async def test_a_cancelled_stream_stops_the_draft(world: World, gateway: Gateway) -> None:
    world.draft.gate.close()
    stream = gateway.generate()
    received = Received()
    received.receive(await anext(stream))
    await world.draft.called(1)
    stream.cancel()
    await world.draft.was_cancelled()
    await gateway.idle()
    assert not world.target.calls

    world.draft.gate.open()
    must_be_true(await received.listen(gateway.client.resume_stream(stream)))


@any_credit
async def test_streams_cancelled_at_any_point_leave_nothing(world: World, gateway: Gateway) -> None:
    for count in range(10):
        stream = gateway.generate(max_tokens=LONG)
        await receive(stream, until=count * 3)
        stream.cancel()
    await gateway.idle()
    stream = gateway.generate()
    must_be_true(await receive(stream))
    requests = [call.slice for call in world.target.calls if call.slice.session_id == stream.session_id]
    assert requests[0].start == 0


@any_credit
async def test_an_aborted_session_ends_its_stream(world: World) -> None:
    first, second = await world.gateway(), await world.gateway()
    for aborter in (first, second):
        world.target.gate.close()
        stream = first.generate()
        world.target.gate.permit(1)
        received = await receive(stream, until=1)
        await aborter.client.abort(stream.session_id)
        if aborter is second:
            world.target.gate.open()
        await received.listen(stream)
        assert received.end.reason == pb.Finished.REASON_ABORTED
        logged = len(received.tokens)
        assert received.end.usage.output_tokens == logged < MAX_TOKENS
        await first.idle()

        calls = len(world.target.calls)
        for gateway in (first, second):
            again = await receive(gateway.client.resume(stream.session_id, 0))
            assert again.tokens == received.tokens
            assert again.end.reason == pb.Finished.REASON_ABORTED
        assert len(world.target.calls) == calls
        await second.client.abort(stream.session_id)


async def test_aborting_a_finished_session_changes_nothing(gateway: Gateway) -> None:
    stream = gateway.generate()
    whole = await receive(stream)
    await gateway.client.abort(stream.session_id)
    again = await receive(gateway.client.resume(stream.session_id, 0))
    assert again.end.reason == whole.end.reason == pb.Finished.REASON_LENGTH
    assert again.tokens == whole.tokens


@any_credit
async def test_a_draining_gateway_finishes_its_streams(world: World) -> None:
    gateway = await world.gateway(drain_timeout_s=20)
    stream, received = await world.held(gateway, 1)
    stopping = asyncio.create_task(gateway.running.stop())
    async with asyncio.timeout(PATIENCE_S):
        while (error := await refused_or_held(gateway.generate())) is None:
            pass
    assert error == grpc.StatusCode.UNAVAILABLE
    assert await refused_or_held(gateway.client.resume(stream.session_id, 0)) == grpc.StatusCode.UNAVAILABLE
    world.target.gate.open()
    must_be_true(await received.listen(stream))
    await stopping
    await gateway.idle()


async def refused_or_held(stream: AsyncStream) -> grpc.StatusCode | None:
    try:
        await anext(stream)
    except GalleyRpcError as error:
        return error.code
    stream.cancel()
    return None


async def test_a_draining_gateway_hands_over_long_streams(world: World) -> None:
    leaving, staying = await world.gateway(drain_timeout_s=1), await world.gateway()
    stream = leaving.generate(max_tokens=LONG)
    received = await receive(stream, until=1)
    stopping = asyncio.create_task(leaving.running.stop())
    error = await refused(received.listen(stream))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in error.message
    await stopping
    await leaving.idle()
    assert not world.target.cancelled, "a round under way is finished"

    enough = len(received.tokens) + 50
    resumed = staying.client.resume_stream(stream)
    await received.listen(resumed, until=enough)
    assert received.tokens[:enough] == true_output(PROMPT_TOKENS, enough, SEED)
    resumed.cancel()
    await staying.idle()


@pytest.mark.parametrize("hung", ["draft", "target"])
async def test_a_gateway_stops_in_time_while_a_pool_hangs(world: World, hung: str) -> None:
    gateway, other = await world.gateway(drain_timeout_s=0.5), await world.gateway()
    pool = world.draft if hung == "draft" else world.target
    pool.gate.close()
    stream = gateway.generate()
    received = Received()
    received.receive(await anext(stream))
    await pool.called(1)
    async with asyncio.timeout(PATIENCE_S):
        await gateway.running.stop()
    error = await refused(received.listen(stream))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "shutting down" in error.message
    await pool.was_cancelled()
    pool.gate.open()
    must_be_true(await received.listen(other.client.resume_stream(stream)))


@any_credit
async def test_a_session_may_go_on_without_its_client(world: World) -> None:
    first, second = await world.gateway(buffer=8), await world.gateway()
    for leave in ("cancel", "break"):
        world.target.gate.close_after(2)
        client = await AsyncClient(first.address, retries=NO_RETRIES).__aenter__()
        stream = client.stream(
            PROMPT, max_tokens=256, seed=SEED, ignore_eos=True, continue_without_client=True
        )
        received = await receive(stream, until=2)
        if leave == "cancel":
            stream.cancel()
        await client.__aexit__(None, None, None)
        world.target.gate.open()
        await world.target.watch.until(lambda: world.target.confirmed[stream.session_id] == 256)  # noqa: B023
        await first.idle()
        calls = len(world.target.calls)
        must_be_true(await received.listen(second.client.resume_stream(stream)), max_tokens=256)
        assert len(world.target.calls) == calls, "it was all there"


async def test_a_session_without_client_keeps_its_place(world: World) -> None:
    gateway = await world.gateway(max_sessions=1)
    world.target.gate.close()
    stream = gateway.generate(continue_without_client=True)
    await anext(stream)
    await world.target.called(1)
    stream.cancel()
    while await refused_or_held(gateway.generate()) is not grpc.StatusCode.RESOURCE_EXHAUSTED:
        pass
    world.target.gate.open()
    await gateway.idle()
    must_be_true(await receive(gateway.generate()))


async def test_a_session_without_client_joins_aborts_and_drains(
    world: World,
) -> None:
    gateway, other = await world.gateway(drain_timeout_s=0.5), await world.gateway()
    streams = []
    for _ in range(3):
        call_count = len(world.target.calls)
        world.target.gate.close()
        stream = gateway.generate(max_tokens=500, continue_without_client=True)
        await anext(stream)
        await world.target.called(call_count + 1)
        stream.cancel()
        streams.append(stream)
    joined, aborted, drained = streams
    await gateway.client.abort(aborted.session_id)
    taken = other.client.resume_stream(joined)
    received = Received()
    received.receive(await anext(taken))
    async with asyncio.timeout(PATIENCE_S):
        await gateway.running.stop()
    world.target.gate.open()
    must_be_true(await received.listen(taken), max_tokens=500)
    over = await receive(other.client.resume(aborted.session_id, 0))
    assert over.end.reason == pb.Finished.REASON_ABORTED
    must_be_true(await receive(other.client.resume(drained.session_id, 0)), max_tokens=500)

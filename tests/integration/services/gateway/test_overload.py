"""Twenty times as many calls as there are slots: the rest is refused at once, before any work."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any, cast

import grpc
import pytest

from galley.client.client import AsyncStream, GalleyRpcError
from galley.common.models.tokenizer import Tokenizer
from services.gateway.generation import SHORT_BYTES
from tests.fakes.redis_servers import Server
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import Received, World, any_credit, must_be_true, receive, refused

PLACES = 4
CALLS = 20 * PLACES


async def first_of(stream: AsyncStream) -> AsyncStream | GalleyRpcError:
    try:
        await anext(stream)
    except GalleyRpcError as error:
        return error
    return stream


@any_credit
async def test_an_overload_is_refused_at_once(world: World) -> None:
    gateway = await world.gateway(max_sessions=PLACES)
    world.target.gate.close()
    # The answers would come only once the gate is open: what comes before was refused without waiting.
    outcomes = await asyncio.gather(*(first_of(gateway.generate()) for _ in range(CALLS)))
    refusals = [outcome for outcome in outcomes if isinstance(outcome, GalleyRpcError)]
    streams = [outcome for outcome in outcomes if isinstance(outcome, AsyncStream)]
    assert len(streams) == PLACES
    assert {error.code for error in refusals} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    waits = sorted(error.retry_after_s or 0.0 for error in refusals)
    assert waits[0] > 0
    assert len(set(waits)) == len(waits), "they do not all come back at once"
    assert len({call.slice.session_id for call in [*world.target.calls, *world.draft.calls]}) <= PLACES

    resumed = await refused(receive(gateway.client.resume("0" * 32, 0)))
    assert resumed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{PLACES} streams" in resumed.message

    world.target.gate.open()
    for received in await asyncio.gather(*(Received().listen(stream) for stream in streams)):
        assert received.finished is not None
    await gateway.idle()
    must_be_true(await receive(gateway.generate()))


async def test_a_saturated_gateway_refuses_new_streams_and_serves_the_open_ones(world: World) -> None:
    gateway = await world.gateway()
    stream, received = await world.held(gateway, 2)
    streams = cast("Any", gateway.running.service)._streams
    streams.is_saturated = lambda: True
    for call in (gateway.generate(), gateway.client.resume(stream.session_id, 0)):
        error = await refused(receive(call))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (error.retry_after_s or 0.0) > 0
        assert "saturated by 1 streams" in error.message
    world.target.gate.open()
    must_be_true(await received.listen(stream))
    streams.is_saturated = lambda: False
    must_be_true(await receive(gateway.generate()))


async def test_calls_to_abort_have_places_of_their_own(frail_world: World, own_store: Server) -> None:
    gateway = await frail_world.gateway(max_sessions=1, store_timeout_s=2)
    frail_world.target.gate.close()
    stream = gateway.generate()
    await anext(stream)
    own_store.pause()
    calls = [refused(gateway.client.abort(stream.session_id)) for _ in range(CALLS)]
    codes = Counter([error.code for error in await asyncio.gather(*calls)])
    own_store.go_on()
    assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED: CALLS - 1, grpc.StatusCode.UNAVAILABLE: 1}
    await gateway.client.abort(stream.session_id)
    assert (await Received().listen(stream)).finished is not None


async def test_a_short_request_does_not_wait_for_a_long_one_of_its_caller(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, began, go_on = Tokenizer.encode, threading.Event(), threading.Event()

    def slow(tokenizer: Tokenizer, text: str, most_tokens: int | None = None) -> list[int]:
        if len(text) > SHORT_BYTES:
            began.set()
            go_on.wait(PATIENCE_S)
        return encode(tokenizer, text, most_tokens)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    gateway = await world.gateway()
    long = asyncio.create_task(receive(gateway.generate("x" * (SHORT_BYTES + 1))))
    await asyncio.to_thread(began.wait, PATIENCE_S)
    must_be_true(await receive(gateway.generate()))
    assert not long.done()
    go_on.set()
    assert (await long).finished is not None

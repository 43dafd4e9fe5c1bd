"""One idempotency key is one session: whoever asks again has its answer from the beginning."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import grpc
import pytest

from galley.client.client import AsyncStream, GalleyRpcError
from tests.fakes.truth import logprobs_of
from tests.fakes.world import Gateway, Received, World, any_credit, must_be_true, receive, refused


async def outcome(stream: AsyncStream) -> Received | grpc.StatusCode:
    try:
        return await receive(stream)
    except GalleyRpcError as error:
        return error.code


@any_credit
async def test_one_of_two_concurrent_calls_is_superseded(world: World, gateway: Gateway) -> None:
    for number in range(10):
        key = f"key-{world.id}-{number}"
        both = await asyncio.gather(*(outcome(gateway.generate(idempotency_key=key)) for _ in range(2)))
        answers = [one for one in both if isinstance(one, Received)]
        assert answers
        for answer in answers:
            must_be_true(answer)
        assert {one for one in both if not isinstance(one, Received)} <= {grpc.StatusCode.FAILED_PRECONDITION}
    await gateway.idle()


async def test_a_newer_call_ends_the_older_at_once(world: World, gateway: Gateway) -> None:
    key = f"key-{world.id}-older"
    older, received = await world.held(gateway, 1, idempotency_key=key)
    newer = gateway.generate(idempotency_key=key)
    await anext(newer)
    error = await refused(received.listen(older))
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    world.target.gate.open()
    must_be_true(await receive(newer))


@any_credit
@pytest.mark.parametrize("elsewhere", [False, True], ids=["here", "elsewhere"])
async def test_a_repeated_call_has_the_whole_answer(world: World, elsewhere: bool) -> None:
    first, second = await world.gateway(), await world.gateway()
    key = f"key-{world.id}-{elsewhere}"
    stream, before = await world.held(first, 3, idempotency_key=key, logprobs=2, seed=None)
    stream.cancel()
    await first.idle()
    calls = len(world.target.calls)
    world.target.gate.open()
    again = await receive(
        (second if elsewhere else first).generate(idempotency_key=key, logprobs=2, seed=None)
    )
    assert before.started is not None
    assert again.started == before.started
    must_be_true(again, seed=before.started.seed)
    known = len(before.tokens)
    assert again.from_draft[:known] == before.from_draft
    assert again.logprobs == [logprobs_of(token, 2) for token in again.tokens]
    went_on = world.target.calls[calls].slice
    assert went_on.start + len(went_on.tokens) - went_on.prompt_len >= known, "where its log ended"


async def test_a_key_is_usable_after_a_cancelled_claim(world: World, gateway: Gateway) -> None:
    key = f"key-{world.id}-gone"
    for _ in range(5):
        stream = gateway.generate(idempotency_key=key)
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.001)
        stream.cancel()
    must_be_true(await receive(gateway.generate(idempotency_key=key)))
    await gateway.idle()

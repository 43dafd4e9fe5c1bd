"""Faults of the target, and of the gateway: a pause or a named end, never another token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import grpc
import pytest

from galley.client.client import GalleyRpcError
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, Gateway, Received, World, any_credit, must_be_true, receive, refused


@any_credit
@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.INTERNAL,
    ],
    ids=lambda code: code.name,
)
async def test_a_broken_stream_to_the_target_is_a_pause(world: World, code: grpc.StatusCode) -> None:
    gateway = await world.gateway()
    world.target.gate.close()
    streams = [gateway.generate(), gateway.generate()]
    await world.target.called(2)
    world.target.fail(code, times=3)
    world.target.gate.open()
    for received in await asyncio.gather(*map(receive, streams)):
        must_be_true(received)
    assert world.target.failures_left == 0


@any_credit
@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED], ids=lambda code: code.name
)
async def test_a_refused_request_is_sent_again(world: World, gateway: Gateway, code: grpc.StatusCode) -> None:
    world.target.item_failure = code
    stream = gateway.generate()
    await world.target.has_answered(2)
    world.target.item_failure = None
    must_be_true(await receive(stream))


@any_credit
async def test_a_restarted_target_continues_with_the_same_tokens(world: World, gateway: Gateway) -> None:
    stream, received = await world.held(gateway, 3, until=1)
    await world.target.waits_after(3)
    call_count = len(world.target.calls)
    await world.target.stop()
    await world.target.start()
    world.target.gate.open()
    must_be_true(await received.listen(stream))
    assert world.target.incarnations == 2
    assert any(call.slice.start == 0 for call in world.target.calls[call_count:]), (
        "what it lacked, it was sent"
    )


@any_credit
async def test_a_session_is_resumable_after_its_target_died(world: World) -> None:
    gateway = await world.gateway(target_timeout_s=0.3)
    stream, received = await world.held(gateway, 1)
    await world.target.waits_after(1)
    await world.target.stop()
    error = await refused(received.listen(stream))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "target" in error.message
    await gateway.idle()

    await world.target.start()
    world.target.gate.open()
    async with asyncio.timeout(PATIENCE_S):
        while received.finished is None:  # gRPC comes to know of it within a second
            stream = gateway.client.resume_stream(stream)
            try:
                await received.listen(stream)
            except GalleyRpcError as again:
                if again.code is not grpc.StatusCode.UNAVAILABLE:
                    raise
    must_be_true(received)


@any_credit
async def test_a_hanging_target_times_out(world: World) -> None:
    gateway = await world.gateway(target_timeout_s=0.2, verify_timeout_s=0.2)
    world.target.gate.close()
    error = await refused(receive(gateway.generate()))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    await world.target.was_cancelled()
    assert len(world.target.calls) == 1, "it has failed since it got the request"


async def test_invalid_logits_are_an_internal_error(world: World, gateway: Gateway) -> None:
    world.target.item_failure = grpc.StatusCode.INTERNAL
    stream = gateway.generate()
    received = Received()
    error = await refused(received.listen(stream))
    assert (error.code, error.message) == (grpc.StatusCode.INTERNAL, "internal error")
    assert len(world.target.calls) == 1
    await gateway.idle()

    world.target.item_failure = None
    must_be_true(await received.listen(gateway.client.resume_stream(stream)))


def too_many(result: pb.VerifyResult) -> None:
    result.tokens.extend([1] * 20)


def no_tokens(result: pb.VerifyResult) -> None:
    del result.tokens[:]


def elsewhere(result: pb.VerifyResult) -> None:
    result.position += 1


def other_vocabulary(result: pb.VerifyResult) -> None:
    result.tokens[-1] = 2**32 - 1


def never_drafted(result: pb.VerifyResult) -> None:
    result.accepted = result.verified = 16


@any_credit
@pytest.mark.parametrize(
    "broken", [too_many, no_tokens, elsewhere, other_vocabulary, never_drafted], ids=lambda lie: lie.__name__
)
async def test_an_invalid_verdict_reaches_no_client(
    world: World, broken: Callable[[pb.VerifyResult], None]
) -> None:
    gateway = await world.gateway()
    world.target.spoil = broken
    received = Received()
    error = await refused(received.listen(gateway.generate()))
    assert error.code is grpc.StatusCode.INTERNAL
    assert not received.tokens


async def test_a_cache_of_other_tokens_is_a_miss(world: World, gateway: Gateway) -> None:
    world.target.gate.close_after(2)
    stream = gateway.generate()
    await world.target.called(3)
    for held in world.target._held.values():
        held[3:] = [(token + 1) % 256 for token in held[3:]]
    world.target.gate.open()
    must_be_true(await receive(stream))
    assert world.target.misses > 0


async def test_a_change_of_build_is_reported_at_its_token(world: World) -> None:
    gateway, other = await world.gateway(draft="none"), await world.gateway(draft="none")
    world.target.gate.close()
    stream = gateway.generate(logprobs=0)
    for index in range(1, 4):
        world.target.gate.permit()
        await world.target.called(index + 1)
    world.target.fingerprint = "build-2"
    world.target.gate.open()
    received = await receive(stream)
    must_be_true(received)
    assert received.changes == [(3, "build-2")]

    for index in (0, 1, 2, 3):
        again = await receive(other.client.resume(stream.session_id, index), first_index=index)
        assert again.changes == [(3, "build-2")]
        assert again.tokens == received.tokens[index:]
    for index in (4, MAX_TOKENS):
        again = await receive(other.client.resume(stream.session_id, index), first_index=index)
        assert again.changes == []


@any_credit
async def test_a_change_of_build_is_reported_on_resume(world: World) -> None:
    gateway = await world.gateway(draft="none")
    stream, received = await world.held(gateway, 2)
    stream.cancel()
    await gateway.idle()
    world.target.fingerprint = "build-2"
    world.target.gate.open()
    other = await world.gateway(draft="none")
    must_be_true(await received.listen(other.client.resume_stream(stream)))
    assert received.changes == [(2, "build-2")]


@any_credit
async def test_a_restarted_target_is_identified_before_use(world: World) -> None:
    gateway = await world.gateway(target_timeout_s=3)
    must_be_true(await receive(gateway.generate()))
    await world.target.stop()
    world.target.fingerprint = "build-2"
    await world.target.start()
    must_be_true(await receive(gateway.generate()))
    assert (await gateway.client.model_info()).fingerprint == "build-2"

    await world.target.stop()
    world.target.tokenizer_hash = "another"
    await world.target.start()
    calls = len(world.target.calls)
    error = await refused(receive(gateway.generate()))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert len(world.target.calls) == calls, "the tokens of one tokenizer mean nothing to another"


async def test_a_failing_tokenizer_is_an_internal_error(world: World) -> None:
    def fails(ids: Sequence[int]) -> str:
        raise ValueError("cannot decode")

    gateway = await world.gateway()
    cast("Any", gateway.running.service)._streams._replays._decode = fails
    error = await refused(receive(gateway.generate()))
    assert (error.code, error.message) == (grpc.StatusCode.INTERNAL, "internal error")
    await gateway.idle()

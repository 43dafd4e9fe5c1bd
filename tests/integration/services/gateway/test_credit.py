"""A target that goes on unasked, over real gRPC: fewer messages, the same tokens."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.world import MAX_TOKENS, Gateway, World, must_be_true, receive


async def gateway_with_credit(world: World, credit: int = 32, **given: object) -> Gateway:
    return await world.gateway(credit=credit, **given)


@pytest.mark.parametrize("credit", [1, 2, 32])
@pytest.mark.parametrize("spoil_rate", [0.0, 0.3, 1.0])
async def test_the_same_tokens_with_any_credit_and_draft(
    world: World, credit: int, spoil_rate: float
) -> None:
    world.draft.spoil_rate = spoil_rate
    gateway = await gateway_with_credit(world, credit)
    for received in await asyncio.gather(*(receive(gateway.generate(logprobs=1)) for _ in range(4))):
        must_be_true(received)
        assert len(received.logprobs) == MAX_TOKENS


async def test_plain_decoding_sends_one_request(world: World) -> None:
    world.target.pass_s = 0.002
    gateway = await gateway_with_credit(world, draft="none")
    received = await receive(gateway.generate())
    must_be_true(received)
    [item] = world.target.calls
    assert (item.credit, item.hint_due) == (32, False)
    assert len(world.target.extensions) <= MAX_TOKENS // 8
    assert received.end.speculation.rounds == MAX_TOKENS


async def test_plain_decoding_needs_few_extensions(world: World) -> None:
    world.target.pass_s = 0.002
    gateway = await gateway_with_credit(world, draft="none", window=64, buffer=256)
    must_be_true(await receive(gateway.generate(max_tokens=256)), max_tokens=256)
    assert len(world.target.calls) + len(world.target.extensions) <= 256 // 16


async def test_hints_reach_a_target_that_is_under_way(world: World) -> None:
    gateway = await gateway_with_credit(world)
    world.target.gate.close()
    stream = gateway.generate()
    await world.target.called(1)
    assert world.target.calls[0].hint_due
    await world.target.extended(lambda extension: extension.HasField("hint"))
    world.target.gate.permit(1)
    prompt = world.target.calls[0].slice.prompt_len
    await world.target.extended(
        lambda reported: reported.hint.position + len(reported.hint.draft_tokens) > prompt + 5
    )
    world.target.gate.open()
    received = await receive(stream)
    must_be_true(received)
    assert received.end.speculation.accepted > 0
    assert received.end.speculation.accepted == sum(received.from_draft)


async def test_a_silent_draft_delays_no_token(world: World) -> None:
    world.draft.gate.close()
    gateway = await gateway_with_credit(world)
    received = await receive(gateway.generate())
    must_be_true(received)
    assert received.end.speculation.drafted == 0


@pytest.mark.parametrize("draft", [True, False])
async def test_a_session_that_is_preempted_goes_on(world: World, draft: bool) -> None:
    world.target.preemptions_left = 5
    gateway = await gateway_with_credit(world, draft=world.draft.address if draft else "none")
    must_be_true(await receive(gateway.generate()))
    assert world.target.preemptions_left == 0
    assert any(call.slice.start > 0 for call in world.target.calls[1:]), "what it kept was not sent again"


async def test_a_target_silent_mid_request_times_out(world: World) -> None:
    gateway = await gateway_with_credit(world, draft="none", verify_timeout_s=0.2)
    world.target.gate.close_after(3)
    stream = gateway.generate()
    await world.target.was_cancelled()
    world.target.gate.open()
    must_be_true(await receive(stream))
    assert world.target.cancelled == 1


async def test_the_timeout_is_per_response(world: World) -> None:
    world.target.pass_s = 0.06
    gateway = await gateway_with_credit(world, draft="none", verify_timeout_s=2)
    must_be_true(await receive(gateway.generate()))
    assert len(world.target.calls) == 1


async def test_a_stop_string_cancels_the_request(world: World) -> None:
    plain = await receive((await world.gateway()).generate())
    gateway = await gateway_with_credit(world, draft="none")
    stop = plain.text[10:14]
    world.target.pass_s = 0.005
    received = await receive(gateway.generate(stop=[stop]))
    assert received.end.stop == stop
    assert received.text == plain.text[: plain.text.index(stop)]
    await world.target.was_cancelled()

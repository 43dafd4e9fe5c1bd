"""Drafts are hints: whatever a draft does costs speed, never a token and never a stream."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import grpc
import pytest
from structlog.testing import capture_logs

from galley.client.options import Speculation
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.truth import VOCAB
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, Gateway, World, any_credit, must_be_true, receive

COOLDOWN_S = 0.25  # galley.core.session.machine.SessionLimits.draft_cooldown_ns


def random_tokens(item: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    chance = random.Random(item.slice.request_id)
    answer.result.draft_tokens[:] = [chance.randrange(VOCAB) for _ in answer.result.draft_tokens]


def too_many(_: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    answer.result.draft_tokens.extend([*answer.result.draft_tokens] * 20)


def too_few(_: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    del answer.result.draft_tokens[1:]


def none_at_all(_: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    del answer.result.draft_tokens[:]


def other_vocabulary(_: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    answer.result.draft_tokens[1:] = [VOCAB, 2**32 - 1]


def wrong_position(_: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    answer.result.position += 1


def wrong_content(_: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    answer.result.prefix_hash = b"x" * 16


def boasts_of_its_cache(_: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    answer.result.kv_len = 2**31


def internal(_: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    answer.status.code, answer.status.message = grpc.StatusCode.INTERNAL.value[0], "broken"


def misses_forever(_: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    answer.cache_miss.have, answer.cache_miss.prefix_hash = 3, b"y" * 16


def misses_beyond_the_end(_: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    answer.cache_miss.have, answer.cache_miss.prefix_hash = 2**32 - 1, b"y" * 16


def superseded(_: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    answer.superseded.position = 1


def clear_answer(_: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    answer.Clear()


def another_request(_: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    answer.request_id += 1


INVALID_PROPOSALS: list[Callable[[pb.ProposeItem, pb.ProposeAnswer], None]] = [
    random_tokens,
    too_many,
    too_few,
    none_at_all,
    other_vocabulary,
    wrong_position,
    wrong_content,
    boasts_of_its_cache,
    internal,
    misses_forever,
    misses_beyond_the_end,
    superseded,
    clear_answer,
    another_request,
]


@pytest.mark.parametrize("spoil_rate", [0.0, 0.3, 1.0])
async def test_acceptance_changes_no_token(world: World, spoil_rate: float) -> None:
    world.draft.spoil_rate = spoil_rate
    gateway = await world.gateway()
    received = await receive(gateway.generate(speculation=Speculation(k=4)))
    must_be_true(received)
    stats = received.end.speculation
    assert stats.accepted == sum(received.from_draft)
    assert (stats.accepted > 0) == (spoil_rate < 1)
    if spoil_rate == 0:
        # 4 draft tokens and the target's own; or fewer, where more of them were not ready yet.
        assert MAX_TOKENS // 5 <= stats.rounds <= MAX_TOKENS // 3


@any_credit
@pytest.mark.parametrize("corrupt", INVALID_PROPOSALS, ids=lambda corrupt: corrupt.__name__)
async def test_an_invalid_proposal_is_harmless(
    world: World, corrupt: Callable[[pb.ProposeItem, pb.ProposeAnswer], None]
) -> None:
    world.draft.corrupt = corrupt
    gateway = await world.gateway(draft_timeout_s=0.1)
    must_be_true(await receive(gateway.generate()))
    assert world.draft.calls


@any_credit
async def test_draft_calls_that_fail_are_harmless(world: World) -> None:
    world.draft.fail(grpc.StatusCode.INTERNAL, times=1000)
    gateway = await world.gateway()
    must_be_true(await receive(gateway.generate()))
    assert world.draft.calls


async def test_a_silent_draft_costs_a_timeout_and_a_pause(world: World) -> None:
    timeout_s = 0.05
    world.draft.gate.close()
    gateway = await world.gateway(draft_timeout_s=timeout_s)
    received = await receive(gateway.generate())
    must_be_true(received)
    request, stats = len(world.draft.calls), received.end.speculation
    assert stats.drafted == 0
    assert 1 <= request <= 1 + stats.round_ns / 1e9 / COOLDOWN_S
    # The draft never answers, so any bound shows that nothing waits for it.
    assert stats.draft_ns / 1e9 <= request * timeout_s + 10


async def test_a_draft_that_answers_late_is_harmless(world: World) -> None:
    async def wait_for_target() -> None:
        await world.target.called(call_count + 1)

    gateway = await world.gateway(draft_timeout_s=0.05)
    call_count = len(world.target.calls)
    world.draft.before_answering = wait_for_target
    must_be_true(await receive(gateway.generate()))
    assert world.draft.calls


@any_credit
async def test_a_draft_killed_mid_stream_does_not_end_the_stream(world: World, gateway: Gateway) -> None:
    world.target.gate.close()
    stream = gateway.generate()
    world.target.gate.permit(2)
    await world.target.waits_after(2)
    await world.draft.stop()
    world.target.gate.open()
    must_be_true(await receive(stream))


async def test_a_gateway_starts_without_its_draft_and_pairs_later(world: World) -> None:
    await world.draft.stop()
    gateway = await world.gateway()
    received = await receive(gateway.generate())
    must_be_true(received)
    await world.draft.start()
    async with asyncio.timeout(PATIENCE_S):
        while not any(received.from_draft):
            received = await receive(gateway.generate())


async def test_a_draft_that_changes_its_tokenizer_is_not_used(world: World, gateway: Gateway) -> None:
    await world.draft.stop()
    must_be_true(await receive(gateway.generate()))
    world.draft.tokenizer_hash = "another"
    await world.draft.start()
    with capture_logs() as logs:
        async with asyncio.timeout(PATIENCE_S):
            while not any("another" in str(line.get("reason")) for line in logs):
                received = await receive(gateway.generate())
                must_be_true(received)
                assert not any(received.from_draft)
    [*_, line] = [line for line in logs if "another" in str(line.get("reason"))]
    assert world.tokenizer_hash in line["reason"]
    assert not world.draft.calls

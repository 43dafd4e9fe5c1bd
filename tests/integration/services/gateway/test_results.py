"""Whole answers of a real gateway, by both clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from galley import (
    AlreadyExistsError,
    AsyncClient,
    Client,
    DeadlineExceededError,
    InvalidArgumentError,
    Message,
    NotFoundError,
    Result,
    Retries,
    Speculation,
)
from tests.fakes.truth import ASSISTANT, SEED, USER, logprobs_of, text_of, true_output
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, PROMPT, PROMPT_TOKENS, Gateway, World, any_credit

OPTIONS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "seed": SEED, "ignore_eos": True}
TRUTH = true_output(PROMPT_TOKENS, MAX_TOKENS)
SOON = Retries(patience_s=10.0, first_pause_s=0.01)


async def in_time(answer: Awaitable[Result]) -> Result:
    async with asyncio.timeout(PATIENCE_S):
        return await answer


def must_be_true(result: Result) -> None:
    assert result.tokens == TRUTH
    assert result.text == text_of(TRUTH)
    assert len(result.from_draft) == len(TRUTH)
    assert (result.finish_reason, result.stop, result.seed) == ("length", None, SEED)
    assert (result.usage.prompt_tokens, result.usage.output_tokens) == (len(PROMPT_TOKENS), MAX_TOKENS)
    assert (result.fingerprint, result.numerics_changed, result.first_index) == ("build-1", [], 0)


@any_credit
async def test_both_clients_return_the_whole_answer(gateway: Gateway, credit: int) -> None:
    info = await gateway.client.model_info()
    with Client(gateway.address) as client:
        for result in (
            await in_time(gateway.client.generate(PROMPT, logprobs=2, **OPTIONS)),
            await in_time(asyncio.to_thread(client.generate, PROMPT, logprobs=2, **OPTIONS)),
        ):
            must_be_true(result)
            assert (result.model, result.fingerprint) == (info.model, info.fingerprint)
            assert sum(result.from_draft) == result.speculation.accepted
            assert credit or result.speculation.acceptance_rate > 0
            for token, entry in zip(result.tokens, result.logprobs, strict=True):
                expected = logprobs_of(token, 2)
                assert (entry.logprob, tuple(entry.top.items())) == (expected.logprob, expected.top)


async def test_plain_decoding_gives_the_same_tokens(gateway: Gateway) -> None:
    for speculation in ("off", "auto", Speculation(k=2)):
        result = await in_time(gateway.client.generate(PROMPT, speculation=speculation, **OPTIONS))
        must_be_true(result)
        if speculation == "off":
            assert result.speculation.verified == result.speculation.acceptance_rate == 0


async def test_a_stop_string_is_reported(gateway: Gateway) -> None:
    text = text_of(TRUTH)
    stop = text[5:8]
    result = await in_time(gateway.client.generate(PROMPT, stop=stop, **OPTIONS))
    assert (result.finish_reason, result.stop) == ("stop", stop)
    assert result.text == text[: text.index(stop)]


async def test_a_conversation_continues_with_the_answer(gateway: Gateway) -> None:
    history: list[Message | dict[str, str]] = [{"role": "user", "content": "Hi"}]
    first = await in_time(gateway.client.chat(history, **OPTIONS))
    assert first.tokens == true_output([USER, *b"Hi", ASSISTANT], MAX_TOKENS)
    history += [first.message, Message("user", "And?")]
    second = await in_time(gateway.client.chat(history, **OPTIONS))
    turns = [USER, *b"Hi", ASSISTANT, *first.text.encode(), USER, *b"And?", ASSISTANT]
    assert second.tokens == true_output(turns, MAX_TOKENS)


@any_credit
async def test_a_gateway_that_stops_is_a_pause(world: World) -> None:
    leaving, staying = await world.gateway(drain_timeout_s=0.1), await world.gateway()
    world.target.gate.close_after(2)
    addresses = [leaving.address, staying.address]
    async with AsyncClient(addresses, retries=SOON) as asynchronous:
        with Client(addresses, retries=SOON) as synchronous:
            answers = [
                asyncio.create_task(asynchronous.generate(PROMPT, **OPTIONS)),
                asyncio.create_task(asyncio.to_thread(synchronous.generate, PROMPT, **OPTIONS)),
            ]
            await world.target.waits_after(2)
            stopping = asyncio.create_task(leaving.running.stop())
            world.target.gate.open()
            for answer in answers:
                must_be_true(await in_time(answer))
            await stopping


async def test_another_build_is_reported(world: World) -> None:
    gateway = await world.gateway(draft="none")
    world.target.gate.close_after(3)
    answer = asyncio.create_task(gateway.client.generate(PROMPT, **OPTIONS))
    await world.target.waits_after(3)
    world.target.fingerprint = "build-2"
    world.target.gate.open()
    result = await in_time(answer)
    assert (result.tokens, result.numerics_changed, result.fingerprint) == (TRUTH, [3], "build-2")


async def test_errors_have_the_class_of_their_status(world: World, gateway: Gateway) -> None:
    client = gateway.client
    with pytest.raises(InvalidArgumentError) as bad:
        await client.generate(PROMPT, top_p=2.0)
    assert [field for field, _ in bad.value.violations] == ["sampling.top_p"]
    with pytest.raises(NotFoundError):
        await client.resume("0" * 32).result()
    await client.generate(PROMPT, idempotency_key="of two bodies", **OPTIONS)
    with pytest.raises(AlreadyExistsError):
        await client.generate("Another body.", idempotency_key="of two bodies", **OPTIONS)
    world.target.gate.close_after(2)
    with pytest.raises(DeadlineExceededError) as late:
        await client.generate(PROMPT, timeout_s=1.5, **OPTIONS)
    assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    world.target.gate.open()
    must_be_true(await in_time(client.resume(late.value.session_id).result()))

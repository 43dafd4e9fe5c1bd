"""OpenAI's own client against a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.fakes.truth import SEED, text_of, true_output
from tests.fakes.world import MAX_TOKENS, PROMPT, PROMPT_TOKENS, Gateway, World
from tests.integration.services.gateway.callers import ALICE, KeyFile

TRUTH = text_of(true_output(PROMPT_TOKENS, MAX_TOKENS))
EXTRA = {"ignore_eos": True}
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]


@pytest.fixture
async def openai_client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{gateway.http}/v1", api_key="none") as client:
        yield client


async def test_completion(openai_client: openai.AsyncOpenAI) -> None:
    answer = await openai_client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=MAX_TOKENS, seed=SEED, n=2, logprobs=1, extra_body=EXTRA
    )
    assert answer.choices[0].text == TRUTH
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices) == 2
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == MAX_TOKENS
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT_TOKENS)


async def test_streamed_chat(openai_client: openai.AsyncOpenAI) -> None:
    whole = await openai_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        max_completion_tokens=MAX_TOKENS,
        seed=SEED,
        logprobs=True,
        top_logprobs=3,
        extra_body=EXTRA,
    )
    stream = await openai_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=MAX_TOKENS,
        seed=SEED,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=EXTRA,
    )
    text, usage = "", None
    async for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == MAX_TOKENS
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 3


async def test_sync_client(gateway: Gateway) -> None:
    def call() -> list[str]:
        with openai.OpenAI(base_url=f"http://{gateway.http}/v1", api_key="none") as client:
            stream = client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=MAX_TOKENS, seed=SEED, stream=True, extra_body=EXTRA
            )
            text = "".join(chunk.choices[0].text for chunk in stream)
            return [text, *(model.id for model in client.models.list()), client.models.retrieve("tiny").id]

    assert await asyncio.to_thread(call) == [TRUTH, "tiny", "tiny"]


async def test_errors_have_the_clients_types(openai_client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await openai_client.chat.completions.create(messages=MESSAGES, model="tiny", temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_argument")
    with pytest.raises(openai.NotFoundError) as missing:
        await openai_client.completions.create(model="gpt-4", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        await openai_client.chat.completions.create(
            messages=MESSAGES, model="tiny", response_format={"type": "json_object"}
        )
    assert (unsupported.value.param, unsupported.value.code) == ("response_format", "unsupported_parameter")


async def test_keys(world: World) -> None:
    gateway = await world.gateway(http_port=0, api_keys_file=KeyFile().write(world))
    url = f"http://{gateway.http}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    async with openai.AsyncOpenAI(base_url=url, api_key=ALICE) as alice:
        answer = await alice.completions.create(
            model="", prompt=PROMPT, max_tokens=MAX_TOKENS, seed=SEED, extra_body=EXTRA
        )
        assert answer.choices[0].text == TRUTH


async def test_the_client_retries_when_it_is_told_to(world: World) -> None:
    gateway = await world.gateway(http_port=0, max_sessions=1)
    url = f"http://{gateway.http}/v1"
    world.target.gate.close()

    async def complete(client: openai.AsyncOpenAI) -> str:
        answer = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=MAX_TOKENS, seed=SEED, extra_body=EXTRA
        )
        return answer.choices[0].text

    async with (
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as impatient,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=50) as patient,
    ):
        first = asyncio.create_task(complete(impatient))
        await world.target.gate.has_waiter()
        with pytest.raises(openai.RateLimitError) as full:
            await complete(impatient)
        assert float(full.value.response.headers["retry-after"]) >= 1
        second = asyncio.create_task(complete(patient))
        world.target.gate.open()
        assert await first == TRUTH
        assert await second == TRUTH

"""OpenAI's own client against a gateway."""

from __future__ import annotations

import asyncio

import anyio
import grpc
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.fakes.truth import ASSISTANT, SEED, USER, text_of, true_output
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, PROMPT, PROMPT_TOKENS, Gateway, World
from tests.integration.services.gateway.callers import ALICE, KeyFile

TRUTH = text_of(true_output(PROMPT_TOKENS, MAX_TOKENS))
CHATS = [text_of(true_output([USER, *PROMPT_TOKENS, ASSISTANT], MAX_TOKENS, SEED + i)) for i in range(2)]
EXTRA = {"ignore_eos": True}
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]


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
    assert usage.completion_tokens_details.accepted_prediction_tokens == 0
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 3


async def test_streamed_choices_with_logprobs(openai_client: openai.AsyncOpenAI) -> None:
    stream = await openai_client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=MAX_TOKENS,
        seed=SEED,
        n=2,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        extra_body=EXTRA,
    )
    texts, reasons = ["", ""], ["", ""]
    spelled = [b"", b""]
    async for chunk in stream:
        assert chunk.system_fingerprint == "build-1"
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
            for token in (choice.logprobs.content or ()) if choice.logprobs else ():
                spelled[choice.index] += bytes(token.bytes or ())
                assert len(token.top_logprobs) == 2
    assert texts == CHATS
    assert [data.decode(errors="replace") for data in spelled] == CHATS
    assert reasons == ["length", "length"]


async def test_the_clients_own_assembly_of_a_stream(openai_client: openai.AsyncOpenAI) -> None:
    async with openai_client.chat.completions.stream(
        model="tiny",
        messages=MESSAGES,
        seed=SEED,
        n=2,
        stop=".",  # the client raises an error of its own at the finish reason "length"
        logprobs=True,
        stream_options={"include_usage": True},
    ) as stream:
        whole = await stream.get_final_completion()
    assert [choice.message.content for choice in whole.choices] == [text.partition(".")[0] for text in CHATS]
    assert whole.usage is not None
    logprobs = [len(choice.logprobs.content or ()) for choice in whole.choices if choice.logprobs]
    assert sum(logprobs) == whole.usage.completion_tokens


async def test_parameters_and_headers(openai_client: openai.AsyncOpenAI) -> None:
    raw = await openai_client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        max_completion_tokens=MAX_TOKENS,
        seed=SEED,
        stop=[CHATS[0][5:8], "never"],
        temperature=0.7,
        top_p=0.9,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        logit_bias={"5": 1},
        user="somebody",
        metadata={"kind": "test"},
        service_tier="default",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        extra_headers={"x-request-id": "mine"},
        extra_body={"top_k": 40, "min_p": 0.1, "speculation": {"mode": "fixed", "k": 2}, "workload": "tests"},
    )
    assert raw.headers["x-request-id"] == "mine"
    assert len(raw.headers["x-galley-session-id"]) == 32
    assert "warning" not in raw.headers
    answer = raw.parse()
    assert answer._request_id == "mine"
    assert answer.id == f"chatcmpl-{raw.headers['x-galley-session-id']}"
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (CHATS[0].partition(CHATS[0][5:8])[0], "stop")
    assert choice.message.role == "assistant"


async def test_sync_client(gateway: Gateway) -> None:
    def call() -> list[str | None]:
        with openai.OpenAI(base_url=f"http://{gateway.http}/v1", api_key="none") as client:
            stream = client.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=MAX_TOKENS, seed=SEED, stream=True, extra_body=EXTRA
            )
            text = "".join(chunk.choices[0].text for chunk in stream)
            chat = client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=MAX_TOKENS, seed=SEED, n=2, extra_body=EXTRA
            )
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0)
            return [
                text,
                *(choice.message.content for choice in chat.choices),
                *(model.id for model in client.models.list()),
                client.models.retrieve("tiny").id,
            ]

    assert await asyncio.to_thread(call) == [TRUTH, *CHATS, "tiny", "tiny"]


async def test_errors_have_the_clients_types(openai_client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await openai_client.chat.completions.create(messages=MESSAGES, model="tiny", temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_argument")
    with pytest.raises(openai.NotFoundError) as missing:
        await openai_client.completions.create(model="gpt-4", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        await openai_client.chat.completions.create(messages=MESSAGES, model="tiny", modalities=["audio"])
    assert (unsupported.value.param, unsupported.value.code) == ("modalities", "unsupported_parameter")


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


async def test_each_status_has_its_exception(world: World) -> None:
    keys = KeyFile(alice="max_priority = 0").write(world)
    gateway = await world.gateway(http_port=0, api_keys_file=keys, target_timeout_s=0.5)
    url = f"http://{gateway.http}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=ALICE, max_retries=0) as alice:

        async def complete(prompt: str = PROMPT, key: str = "", timeout_s: str = "", **given: object) -> str:
            headers = {"idempotency-key": key} if key else {}
            if timeout_s:
                headers["x-galley-timeout-s"] = timeout_s
            answer = await alice.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=MAX_TOKENS,
                seed=SEED,
                extra_body=EXTRA | given,
                extra_headers=headers,
            )
            return answer.choices[0].text

        with pytest.raises(openai.PermissionDeniedError) as denied:
            await complete(service_tier="priority")
        assert denied.value.param == "service_tier"
        assert await complete(key="once") == TRUTH
        with pytest.raises(openai.ConflictError):
            await complete(key="once", prompt="Other.")
        with pytest.raises(openai.APIStatusError) as large:
            await complete(prompt="x" * (1 << 17))
        assert large.value.status_code == 413
        world.target.gate.close()
        with pytest.raises(openai.InternalServerError) as late:
            await complete(timeout_s="0.2")
        assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
        world.target.gate.open()
        await world.target.stop()
        with pytest.raises(openai.InternalServerError) as away:
            await complete()
        assert (away.value.status_code, away.value.response.headers["retry-after"]) == (503, "1")


async def test_the_client_does_not_repeat_what_a_repeat_cannot_help(
    world: World, openai_client: openai.AsyncOpenAI
) -> None:
    async def error_of(status: int, prompt: str = PROMPT, **headers: str) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            await openai_client.completions.create(model="tiny", prompt=prompt, extra_headers=headers)
        sent = caught.value.response.request.headers
        assert (caught.value.status_code, sent["x-stainless-retry-count"]) == (status, "0")

    key = {"idempotency-key": "once"}
    await openai_client.completions.create(model="tiny", prompt=PROMPT, extra_headers=key)
    await error_of(409, "Other.", **key)
    world.target.gate.close()
    await error_of(504, **{"x-galley-timeout-s": "0.2"})
    world.target.gate.open()


async def test_a_stream_that_breaks_raises(world: World) -> None:
    gateway = await world.gateway(http_port=0, target_timeout_s=0.5)
    async with openai.AsyncOpenAI(base_url=f"http://{gateway.http}/v1", api_key="none") as client:
        world.target.gate.close_after(2)
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=MAX_TOKENS, seed=SEED, stream=True, extra_body=EXTRA
        )
        texts = [(await anext(stream)).choices[0].text]

        async def read_on() -> None:
            texts.extend([chunk.choices[0].text async for chunk in stream])

        world.target.fail(grpc.StatusCode.UNAVAILABLE, 1000)
        world.target.gate.open()
        with pytest.raises(openai.APIError) as broken:
            await read_on()
        assert broken.value.code == "unavailable"
        assert TRUTH.startswith(texts[0])


async def test_a_client_that_waits_no_longer_ends_the_work(world: World, gateway: Gateway) -> None:
    world.target.gate.close()
    url = f"http://{gateway.http}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=0.3) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(model="tiny", prompt=PROMPT)
    async with asyncio.timeout(PATIENCE_S):
        await gateway.has_places()
    world.target.gate.open()


async def test_the_client_retries_when_it_is_told_to(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = anyio.sleep

    async def counted(delay: float) -> None:
        waits.append(delay)
        if len(waits) == 1:
            world.target.gate.open()
        await sleep(delay)

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
        monkeypatch.setattr(anyio, "sleep", counted)
        assert await complete(patient) == TRUTH
        assert waits[0] >= 1, "as the header says: of itself the client waits half a second"
        assert await first == TRUTH

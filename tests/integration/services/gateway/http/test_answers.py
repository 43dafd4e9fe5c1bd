"""Chats and completions over HTTP: the same tokens as over gRPC, in OpenAI's form."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from typing import Any
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from galley.client.client import AsyncClient
from galley.client.options import Message
from services.gateway.http.api.format import choice_id
from tests.fakes.http_client import BODY, CHAT, Events, HttpClient
from tests.fakes.truth import END, SEED, VOCAB, text_of, true_output
from tests.fakes.world import MAX_TOKENS, PROMPT, PROMPT_TOKENS, Gateway, World, receive

RESPONSE: dict[str, Any] = {
    "input": PROMPT,
    "max_output_tokens": MAX_TOKENS,
    "seed": SEED,
    "ignore_eos": True,
}
MIXED: list[dict[str, Any]] = [
    {"seed": seed, "max_tokens": 8 + 7 * (seed % 5), **more}
    for seed in range(8)
    for more in (
        {},
        {"stop": ["an", "e"], "min_tokens": 3},
        {"stop_token_ids": [97, 101], "ignore_eos": True},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "logprobs": 2},
        {
            "frequency_penalty": 0.5,
            "presence_penalty": -0.5,
            "repetition_penalty": 1.1,
            "logit_bias": {5: 1.5},
        },
    )
]


async def over_grpc(client: AsyncClient, options: dict[str, Any]) -> tuple[list[int], str]:
    received = await receive(client.stream(PROMPT, **options))
    return received.tokens, received.text


async def over_http(client: HttpClient, options: dict[str, Any], *, stream: bool) -> tuple[list[int], str]:
    given = {**options, "logit_bias": {str(key): it for key, it in options.get("logit_bias", {}).items()}}
    body = {"prompt": PROMPT, "return_token_ids": True, **given}
    if stream:
        events = await client.stream("/v1/completions", body)
        assert events.is_done
        return events.tokens(), events.text()
    [choice] = (await client.post("/v1/completions", body)).json()["choices"]
    return choice["token_ids"], choice["text"]


@pytest.mark.parametrize("credit", [32])
async def test_tokens_are_those_of_grpc(gateway: Gateway, client: HttpClient) -> None:
    expected = [await over_grpc(gateway.client, options) for options in MIXED]
    alone = [await over_http(client, options, stream=index % 2 == 0) for index, options in enumerate(MIXED)]
    assert alone == expected
    places = asyncio.Semaphore(16)

    async def beside_others(index: int) -> tuple[list[int], str]:
        async with places:
            return await over_http(client, MIXED[index], stream=index % 2 == 1)

    assert await asyncio.gather(*map(beside_others, range(len(MIXED)))) == expected


async def test_bytes_of_logprobs_are_those_of_grpc(gateway: Gateway, client: HttpClient) -> None:
    received = await receive(gateway.generate((Message("user", PROMPT),), logprobs=20))
    [choice] = (await client.chat(logprobs=True, top_logprobs=20))["choices"]
    assert received.token_bytes == [
        tuple(bytes(one["bytes"]) for one in (entry, *entry["top_logprobs"]))
        for entry in choice["logprobs"]["content"]
    ]


async def test_chat_answer_is_openais(gateway: Gateway, client: HttpClient) -> None:
    body = await client.chat()
    truth = await receive(gateway.generate((Message("user", PROMPT),)))
    session_id = body["id"].removeprefix("chatcmpl-")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": truth.text, "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert (body["object"], body["model"], body["seed"]) == ("chat.completion", "tiny", SEED)
    assert body["system_fingerprint"] == "build-1"
    used = body["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"]) == (len(PROMPT) + 2, MAX_TOKENS)
    details = used["completion_tokens_details"]
    drafting = body["metrics"]["speculative_decoding"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)
    assert drafting["num_accepted_tokens"] > 0
    assert sum(drafting["num_accepted_tokens_per_pos"]) == drafting["num_accepted_tokens"]
    assert len(session_id) == 32


async def test_stream_is_openais(client: HttpClient) -> None:
    events = await client.stream("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
    whole = await client.chat()
    first, *_, last = events.events
    assert first.json["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (first.json["object"], last.data) == ("chat.completion.chunk", "[DONE]")
    assert events.text() == whole["choices"][0]["message"]["content"]
    assert events.finish_reasons() == ["length"]
    assert events.usage["completion_tokens"] == MAX_TOKENS
    ids = [event.id for event in events.events]
    assert len({*ids[1:-2]}) == len(ids[1:-2]), "each event has an id of its own"
    without = await client.stream("/v1/chat/completions", CHAT)
    assert not any('"usage"' in event.data for event in without.events)


@pytest.mark.parametrize("stream", [False, True])
async def test_four_choices_are_those_of_four_seeds(client: HttpClient, stream: bool) -> None:
    alone = [(await client.complete(seed=SEED + i))["choices"][0]["text"] for i in range(4)]
    if stream:
        events = await client.stream("/v1/completions", BODY | {"n": 4})
        texts = [events.text(index) for index in range(4)]
        assert [events.finish_reasons(index) for index in range(4)] == [["length"]] * 4
    else:
        body = await client.complete(n=4)
        texts = [choice["text"] for choice in body["choices"]]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == len(PROMPT_TOKENS)
        assert body["usage"]["completion_tokens"] == 4 * MAX_TOKENS
    assert texts == alone
    assert len(set(texts)) == 4


async def test_a_drawn_seed_can_be_sent_back_by_clients_whose_numbers_are_doubles(client: HttpClient) -> None:
    drawn = await client.complete(seed=None, n=2)
    again = await client.complete(seed=int(float(drawn["seed"])) + 1)
    assert again["choices"][0]["text"] == drawn["choices"][1]["text"]
    assert drawn["seed"] + 1 <= 2**53


async def test_prompts_are_texts_or_token_ids(client: HttpClient) -> None:
    truth = text_of(true_output(PROMPT_TOKENS, MAX_TOKENS))
    for prompt in (PROMPT, [PROMPT], PROMPT_TOKENS, [PROMPT_TOKENS]):
        [choice] = (await client.complete(prompt=prompt))["choices"]
        assert choice["text"] == truth
    two = await client.complete(prompt=[PROMPT, "Go on."], n=2, echo=True)
    texts = [choice["text"] for choice in two["choices"]]
    assert texts[0] == PROMPT + truth
    assert [text.startswith(PROMPT) for text in texts] == [True, True, False, False]
    assert texts[3] == "Go on." + text_of(true_output([*b"Go on."], MAX_TOKENS, SEED + 1))


async def test_a_session_counts_as_its_response_did(world: World, client: HttpClient) -> None:
    answer = await client.complete(prompt=[PROMPT, "Go on."], n=2)
    session_id = answer["id"].removeprefix("cmpl-")

    async def state() -> tuple[list[int], int]:
        read = (await client.raw.get(f"/v1/sessions/{session_id}")).json()
        assert read["usage"]["total_tokens"] == sum(
            read["usage"][name] for name in ("prompt_tokens", "completion_tokens")
        )
        return [choice["index"] for choice in read["choices"]], read["usage"]["prompt_tokens"]

    assert await state() == ([0, 1, 2, 3], answer["usage"]["prompt_tokens"])
    async with Redis.from_url(world.redis_url) as store:
        for index in (1, 2):
            await store.delete(f"galley:sessions:default:{{{choice_id(session_id, index)}}}")
    assert await state() == ([0, 3], answer["usage"]["prompt_tokens"]), "those that have expired are left out"


async def test_logprobs_have_the_form_of_each_api(client: HttpClient) -> None:
    [choice] = (await client.chat(logprobs=True, top_logprobs=2))["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == MAX_TOKENS
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    spelled = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
    assert spelled == choice["message"]["content"]
    [choice] = (await client.complete(logprobs=1, prompt=PROMPT_TOKENS))["choices"]
    logprobs, truth = choice["logprobs"], true_output(PROMPT_TOKENS, MAX_TOKENS)
    assert logprobs["token_logprobs"] == [-(token % 16) / 8 for token in truth]
    lengths = [len(token) for token in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:index]) for index in range(MAX_TOKENS)]
    streamed = await client.stream("/v1/completions", BODY | {"logprobs": 1, "prompt": PROMPT_TOKENS})
    parts = [one.json["choices"][0]["logprobs"] for one in streamed.events[:-1]]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [it for part in parts if part for it in part[name]] == logprobs[name]


async def test_an_answer_ends_at_a_stop(client: HttpClient) -> None:
    truth = text_of(true_output(PROMPT_TOKENS, MAX_TOKENS))
    stop = truth[5:7]
    [choice] = (await client.complete(stop=stop))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (truth.partition(stop)[0], "stop")
    assert choice["stop_reason"] == stop
    [choice] = (await client.complete(ignore_eos=False, max_tokens=500))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", END)


async def test_speculation_is_controlled_by_the_request(client: HttpClient) -> None:
    off = await client.complete(speculation={"mode": "off"})
    fixed = await client.complete(speculation={"mode": "fixed", "k": 2, "strategy": "model"})
    assert off["choices"] == fixed["choices"]
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert len(fixed["metrics"]["speculative_decoding"]["num_accepted_tokens_per_pos"]) == 2


async def test_a_repeat_joins_its_session_over_either_protocol(gateway: Gateway, client: HttpClient) -> None:
    first = await client.post("/v1/completions", BODY, idempotency_key="joined over either protocol")
    again = await client.complete(idempotency_key="joined over either protocol")
    over_grpc = await receive(gateway.generate(idempotency_key="joined over either protocol"))
    assert over_grpc.started is not None
    assert first.headers["x-galley-session-id"] == over_grpc.started.session_id
    assert again["id"] == first.json()["id"]
    other = await client.post(
        "/v1/completions", BODY | {"max_tokens": 3}, idempotency_key="joined over either protocol"
    )
    assert other.json()["error"]["param"] == "idempotency_key"
    assert (other.status_code, other.json()["error"]["code"]) == (409, "already_exists")


@pytest.mark.parametrize(
    ("path", "body", "more"),
    [
        ("/v1/completions", BODY, {"n": 4}),
        ("/v1/completions", BODY, {"prompt": [PROMPT, PROMPT]}),
        ("/v1/completions", BODY, {"echo": True}),
        ("/v1/chat/completions", CHAT, {"return_token_ids": True}),
        ("/v1/chat/completions", CHAT, {"stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/responses", RESPONSE, {"store": False}),
        ("/v1/responses", RESPONSE, {"metadata": {"run": "7"}}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
async def test_a_key_is_of_one_body(
    client: HttpClient, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    for first, second in ((body, body | more), (body | more, body)):
        key = uuid4().hex
        statuses = [
            (await client.post(path, sent, idempotency_key=key)).status_code
            for sent in (first, first, second, first)
        ]
        assert statuses == [200, 200, 409, 200]


async def test_a_key_of_other_prompts_leaves_its_stream_alone(world: World, client: HttpClient) -> None:
    key = uuid4().hex
    events = Events()
    world.target.gate.close_after(4)
    body = BODY | {"prompt": [PROMPT, "Go on."], "max_tokens": 200}
    async with client.open("/v1/completions", body, idempotency_key=key) as response:
        await events.listen(response, until=2)
        other = body | {"prompt": [PROMPT, "Go away."], "stream": True}
        refused = await client.post("/v1/completions", other, idempotency_key=key)
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "already_exists")
        world.target.gate.open()
        await events.listen(response)
    assert events.is_done


async def test_all_choices_go_on_without_their_client(world: World, client: HttpClient) -> None:
    """Those that waited for the prompt of the first one, too."""
    world.target.gate.close()
    events = Events()
    body = BODY | {"n": 3, "continue_without_client": True}
    async with client.open("/v1/completions", body) as response:
        events.session_id = response.headers["x-galley-session-id"]
        await world.target.gate.has_waiter()
    world.target.gate.open()
    ids = [choice_id(events.session_id, index) for index in range(3)]
    await world.target.watch.until(lambda: all(world.target.confirmed[one] == MAX_TOKENS for one in ids))
    again = await client.resume(events)
    assert [again.finish_reasons(index) for index in range(3)] == [["length"]] * 3


async def test_a_key_of_a_chat_is_not_that_of_a_response(gateway: Gateway, client: HttpClient) -> None:
    key = uuid4().hex
    chat = await client.post("/v1/chat/completions", CHAT, idempotency_key=key)
    other = await client.post("/v1/responses", RESPONSE, idempotency_key=key)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "already_exists")
    over_grpc = await receive(gateway.generate((Message("user", PROMPT),), idempotency_key=key))
    assert over_grpc.started is not None
    assert over_grpc.started.session_id == chat.headers["x-galley-session-id"]


async def test_text_and_tokens_are_converted(client: HttpClient) -> None:
    there = (await client.post("/tokenize", {"prompt": "hé", "return_token_strs": True})).json()
    assert (there["tokens"], there["count"]) == ([*"hé".encode()], 3)
    assert there["token_strs"][0] == "h"
    chat = (await client.post("/tokenize", {"messages": CHAT["messages"]})).json()
    assert chat["count"] == len(PROMPT) + 2
    ignored = await client.post("/tokenize", {"prompt": "x", "add_special_tokens": False})
    assert "add_special_tokens" in ignored.headers["warning"]
    back = await client.post("/detokenize", {"tokens": there["tokens"]})
    assert back.json() == {"prompt": "hé"}
    wrong = await client.post("/detokenize", {"tokens": [VOCAB]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens[0]")


@pytest.mark.parametrize("credit", [0, 32])
async def test_rounds_account_for_all_tokens(world: World, client: HttpClient) -> None:
    world.draft.spoil_rate = 0.3
    asked = {
        "return_rounds": True,
        "return_token_ids": True,
        "speculation": {"mode": "fixed", "k": 3},
        "n": 2,
    }
    whole = (await client.chat(**asked))["choices"]
    events = await client.stream("/v1/chat/completions", CHAT | asked)
    for choice in whole:
        index = choice["index"]
        rounds = [one for at in events.choices(index) for one in at.get("rounds", ())]
        for told in (rounds, choice["rounds"]):
            ends = [0, *accumulate(one["confirmed"] for one in told)]
            assert [one["index"] for one in told] == ends[:-1]
            assert ends[-1] == MAX_TOKENS
            assert all(one["accepted"] <= min(one["verified"], one["confirmed"]) for one in told)
            assert {one["strategy"] for one in told if one["verified"]} <= {"model"}
            for one in told:
                of_draft = {"model": [one["accepted"], one["verified"]]}
                assert one["sources"] == (of_draft if one["verified"] else {})
            assert [one["at_ms"] for one in told] == sorted(one["at_ms"] for one in told)
            assert all(one["compute_ms"] > 0 for one in told[:1])
        drafted = sum(sum(at.get("from_draft", ())) for at in events.choices(index))
        assert sum(one["accepted"] for one in rounds) == drafted
    assert "rounds" not in (await client.chat())["choices"][0]

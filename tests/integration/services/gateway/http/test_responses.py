"""The Responses API: the answers of chats, as typed events, kept under the ids of their sessions."""

from __future__ import annotations

import asyncio
import re
import uuid
from typing import Any

import openai
import pytest

from galley.client.options import Message
from tests.attack.http.raw import peer
from tests.fakes.http_client import Events, HttpClient, http_client
from tests.fakes.redis_servers import Server
from tests.fakes.truth import SEED
from tests.fakes.world import MAX_TOKENS, PROMPT, Gateway, World, receive
from tests.integration.services.gateway.callers import ALICE, BOB, KeyFile

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": PROMPT, "max_output_tokens": MAX_TOKENS, "seed": SEED, "ignore_eos": True}
OPENING = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
CLOSING = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
DELTA = "response.output_text.delta"


async def respond(client: HttpClient, **given: Any) -> dict[str, Any]:
    response = await client.post(PATH, BODY | given)
    assert response.status_code == 200, response.text
    return dict(response.json())


def text_of(response: dict[str, Any]) -> str:
    [item] = response["output"]
    [part] = item["content"]
    return str(part["text"])


def deltas(events: Events) -> str:
    return "".join(event.json["delta"] for event in events.events if event.kind == DELTA)


def numbers(events: Events) -> list[int]:
    return [event.json["sequence_number"] for event in events.events]


async def test_a_response_has_the_answer_of_the_chat(gateway: Gateway, client: HttpClient) -> None:
    truth = await receive(gateway.generate((Message("user", PROMPT),)))
    body = await respond(client, metadata={"run": "7"})
    assert text_of(body) == truth.text
    assert (body["object"], body["model"], body["seed"]) == ("response", "tiny", SEED)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (body["metadata"], body["store"], body["temperature"]) == ({"run": "7"}, True, 1.0)
    assert body["usage"]["output_tokens"] == MAX_TOKENS
    assert body["usage"]["total_tokens"] == MAX_TOKENS + body["usage"]["input_tokens"]
    assert body["usage"]["output_tokens_details"]["accepted_prediction_tokens"] == 0


async def test_input_may_be_messages_and_parts(client: HttpClient) -> None:
    plain = await respond(client)
    for given in (
        [{"role": "user", "content": PROMPT}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": PROMPT}]}],
        [{"role": "user", "content": [{"type": "input_text", "text": part} for part in PROMPT]}],
    ):
        assert text_of(await respond(client, input=given)) == text_of(plain)


async def test_events_are_typed_and_numbered(client: HttpClient) -> None:
    whole = await respond(client, top_logprobs=2)
    events = await client.stream(PATH, BODY | {"top_logprobs": 2, "return_token_ids": True})
    kinds = [event.kind for event in events.events]
    assert [kind for kind in kinds if kind != DELTA] == [*OPENING, *CLOSING, "response.incomplete"]
    assert [event.json["type"] for event in events.events] == kinds
    assert numbers(events) == sorted(set(numbers(events)))
    assert deltas(events) == text_of(whole)
    last = events.events[-1].json["response"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert len(whole["output"][0]["content"][0]["logprobs"]) == MAX_TOKENS
    parts = [event.json for event in events.events if event.kind == DELTA]
    assert [entry for part in parts for entry in part["logprobs"]] == last["output"][0]["content"][0][
        "logprobs"
    ]
    assert sum(len(part["token_ids"]) for part in parts) == MAX_TOKENS
    assert events.events[0].json["response"]["id"] == f"resp_{events.session_id}" == last["id"]


async def test_a_stream_goes_on_at_another_gateway_after_any_event(world: World) -> None:
    first, second = await world.gateway(http_port=0), await world.gateway(http_port=0)
    async with http_client(first.http) as client, http_client(second.http) as other:
        whole = await client.stream(PATH, BODY)
        for count in range(1, len(whole.events)):
            events = Events()
            async with client.open(PATH, BODY) as response:
                await events.listen(response, until=count)
            if events.last_id == "done":  # in fewer events: they differ with the drafts
                assert count > len(OPENING) + len(CLOSING) + 1
                break
            await other.resume(events)
            kinds = [event.kind for event in events.events]
            assert [kind for kind in kinds if kind != DELTA] == [*OPENING, *CLOSING, "response.incomplete"]
            assert numbers(events) == sorted(set(numbers(events)))
            assert deltas(events) == deltas(whole)
            assert text_of(events.events[-1].json["response"]) == deltas(whole)


async def test_a_stream_goes_on_after_a_sequence_number(client: HttpClient) -> None:
    whole = await client.stream(PATH, BODY)
    path = f"{PATH}/resp_{whole.session_id}?stream=true&starting_after="
    for count, number in enumerate(numbers(whole), start=1):
        rest = Events()
        async with client.raw.stream("GET", f"{path}{number}") as response:
            if count == len(whole.events):
                assert response.status_code == 204
                break
            await rest.listen(response)
        assert deltas(whole).endswith(deltas(rest))
        assert deltas(rest) == "".join(
            event.json["delta"] for event in whole.events[count:] if event.kind == DELTA
        )
        assert numbers(rest)[-1] == numbers(whole)[-1]
    beyond = await client.raw.get(f"{path}{numbers(whole)[-1] + 1}")
    assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "starting_after")


async def test_a_conversation_goes_on_by_the_id_of_its_last_response(world: World) -> None:
    gateway, other = await world.gateway(http_port=0), await world.gateway(http_port=0)
    async with http_client(gateway.http) as client, http_client(other.http) as elsewhere:
        first = await respond(client, input="One.")
        second = await respond(elsewhere, input="Two.", previous_response_id=first["id"])
        third = await respond(client, input="Three.", previous_response_id=second["id"])
        turns = [
            {"role": "user", "content": "One."},
            {"role": "assistant", "content": text_of(first)},
            {"role": "user", "content": "Two."},
            *second["output"],
            {"role": "user", "content": "Three."},
        ]
        spelled_out = await respond(client, input=turns)
        assert text_of(third) == text_of(spelled_out)
        assert third["usage"]["input_tokens"] == spelled_out["usage"]["input_tokens"]
        assert third["previous_response_id"] == second["id"]


async def test_a_stored_response_is_read_and_cancelled(world: World, client: HttpClient) -> None:
    body = await respond(client, metadata={"a": "b"})
    stored = (await client.raw.get(f"{PATH}/{body['id']}")).json()
    unknown = ("usage", "metrics")
    assert {**stored, **dict.fromkeys(unknown)} == {**body, **dict.fromkeys(unknown)}
    assert stored["usage"]["output_tokens"] == MAX_TOKENS
    assert (await client.raw.post(f"{PATH}/{body['id']}/cancel")).json()["status"] == "incomplete"
    world.target.gate.close_after(2)
    events = Events()
    async with client.open(PATH, BODY | {"max_output_tokens": 1000}) as response:
        await events.listen(response, until=len(OPENING) + 1)
        path = f"{PATH}/resp_{events.session_id}"
        running = (await client.raw.get(path)).json()
        assert running["status"] == "in_progress"
        assert text_of(running).startswith(deltas(events))
        waits = await client.post(PATH, BODY | {"previous_response_id": running["id"]})
        assert (waits.status_code, waits.json()["error"]["param"]) == (400, "previous_response_id")
        cancelled = (await client.raw.post(f"{path}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        await events.listen(response)
    assert events.events[-1].json["response"]["status"] == "cancelled"
    world.target.gate.open()


async def test_a_deleted_response_is_gone_at_all_gateways(world: World) -> None:
    gateway, other = await world.gateway(http_port=0), await world.gateway(http_port=0)
    async with http_client(gateway.http) as client, http_client(other.http) as elsewhere:
        ended = await respond(client)
        world.target.gate.close_after(2)
        events = Events()
        async with client.open(PATH, BODY | {"max_output_tokens": 1000}) as response:
            await events.listen(response, until=len(OPENING) + 1)
            running = f"resp_{events.session_id}"
            for one in (ended["id"], running):
                deleted = await elsewhere.raw.delete(f"{PATH}/{one}")
                assert deleted.json() == {"id": one, "object": "response", "deleted": True}
                for answer in (
                    await client.raw.delete(f"{PATH}/{one}"),
                    await client.raw.get(f"{PATH}/{one}"),
                    await client.raw.get(f"/v1/sessions/{one.removeprefix('resp_')}/events"),
                ):
                    assert answer.status_code == 404
            world.target.gate.open()
            await events.listen(response)
        assert events.events[-1].json["response"]["status"] == "cancelled"
        assert (await client.raw.get(f"{PATH}/{running}")).status_code == 404, "it was not stored anew"


async def test_a_request_whose_response_was_deleted_may_be_repeated(client: HttpClient) -> None:
    key = uuid.uuid4().hex
    first = await respond(client, idempotency_key=key)
    assert (await client.raw.delete(f"{PATH}/{first['id']}")).status_code == 200
    again = await respond(client, idempotency_key=key)
    assert (again["id"], text_of(again)) == (first["id"], text_of(first))


async def test_the_input_of_a_response_is_listed_in_pages(client: HttpClient) -> None:
    first = await respond(client, input="One.", instructions="")
    second = await respond(client, input="Two.", previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    listed = (await client.raw.get(path)).json()
    assert [
        (item["role"], item["content"][0]["type"], item["content"][0]["text"]) for item in listed["data"]
    ] == [
        ("user", "input_text", "Two."),
        ("assistant", "output_text", text_of(first)),
        ("user", "input_text", "One."),
    ]
    ids = [item["id"] for item in listed["data"]]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (ids[0], ids[2], False)
    page = (await client.raw.get(f"{path}?order=asc&limit=1&after={ids[2]}")).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == ([ids[1]], True)
    assert (await client.raw.get(f"{path}?after={ids[0]}&order=asc")).json()["data"] == []
    wrong = await client.raw.get(f"{path}?after=msg_1")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "after")


async def test_a_read_counts_until_its_response_was_read(world: World) -> None:
    keys = KeyFile(alice="max_sessions = 1")
    gateway = await world.gateway(http_port=0, api_keys_file=keys.write(world))
    async with (
        http_client(gateway.http, authorization=f"Bearer {ALICE}") as client,
        peer(gateway.http) as slow,
    ):
        path = f"{PATH}/{(await respond(client, max_output_tokens=400, top_logprobs=20))['id']}"
        await slow.send(f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ALICE}\r\n\r\n".encode())
        head = await slow.head()
        for one in (path, f"/v1/sessions/{path[-32:]}"):
            refused = await client.raw.get(one)
            assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        events = await client.raw.get(f"/v1/sessions/{path[-32:]}/events")
        assert events.status_code == 200, "slow readers keep nobody from resuming"
        [length] = re.findall(rb"content-length: (\d+)", head)
        await slow.reader.readexactly(int(length))
        assert (await client.raw.get(path)).status_code == 200


async def test_responses_of_others_and_those_not_stored_are_not_found(world: World) -> None:
    gateway = await world.gateway(http_port=0, api_keys_file=KeyFile().write(world))
    async with http_client(gateway.http, authorization=f"Bearer {ALICE}") as alice:
        kept, dropped = await respond(alice), await respond(alice, store=False)
        chat = (await alice.chat())["id"].removeprefix("chatcmpl-")
        for missing in (dropped["id"], f"resp_{chat}", "resp_" + "0" * 32, "resp_x", "resp_", "x"):
            unknown = await alice.raw.get(f"{PATH}/{missing}")
            assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "response_id")
            refused = await alice.post(PATH, BODY | {"previous_response_id": missing})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "previous_response_not_found")
            assert error["param"] == "previous_response_id"
        assert (await alice.raw.get(f"{PATH}/{kept['id']}")).status_code == 200
        async with http_client(gateway.http, authorization=f"Bearer {BOB}") as bob:
            assert (await bob.raw.get(f"{PATH}/{kept['id']}")).status_code == 404
            refused = await bob.post(PATH, BODY | {"previous_response_id": kept["id"]})
            assert refused.status_code == 400


DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"properties": {"x": DEEP}}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function", "name": "f", "parameters": DEEP}]}, "tools[0]", "nest"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "must be given"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be 'function'"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "must be 'function'"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be 'text', 'json_object'"),
    ({"text": {"verbosity": "low"}}, "text.verbosity", "must be 'medium'"),
    ({"reasoning": {"effort": "high"}}, "reasoning", "is not supported"),
    ({"background": True}, "background", "is not supported"),
    ({"conversation": "conv_1"}, "conversation", "is not supported"),
    ({"truncation": "auto"}, "truncation", "is not supported"),
    ({"n": 2}, "n", "is not supported"),
    ({"max_tokens": 5}, "max_tokens", "is not supported"),
    ({"include": ["reasoning.encrypted_content"]}, "include[0]", "must be 'message.output_text.logprobs'"),
    ({"max_output_tokens": 10**6}, "max_output_tokens", "must be in [1, 65535]"),
    ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1, got 0"),
    ({"temperature": -1.0}, "temperature", "must be >= 0"),
    ({"input": []}, "input", "must have 1 to 1024 entries"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type", "must be 'message', 'function_call'"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "must be 'user', 'assistant'"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "must be text or a list"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]},
        "input[0].content[0].text",
        "must be text",
    ),
    ({"input": ["hi"]}, "input[0]", "must be a JSON object"),
    ({"input": 5}, "input", "must be text or a list"),
    ({"input": [{"role": "user"}]}, "input[0]", "must have a role and a content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0]",
        "input_text",
    ),
    ({"instructions": "Be kind."}, "input", "chat template refuses them"),
    ({"metadata": {"k" * 65: "v"}}, "metadata", "must have at most 64 characters, got 65"),
]


async def test_bad_parameters_name_themselves(world: World, client: HttpClient) -> None:
    for given, param, problem in BAD:
        response = await client.post(PATH, BODY | given)
        error = response.json()["error"]
        assert response.status_code == 400, given
        assert error["param"].startswith(param), error
        assert problem in error["message"], error
    assert not world.target.calls


async def test_a_closed_gateway_fails_the_response_and_another_goes_on(world: World) -> None:
    first, second = await world.gateway(http_port=0, drain_timeout_s=1), await world.gateway(http_port=0)
    world.target.gate.close_after(3)
    events = Events()
    async with http_client(first.http) as client, http_client(second.http) as other:
        async with client.open(PATH, BODY | {"max_output_tokens": 300}) as response:
            await events.listen(response, until=6)
            await first.running.stop()
            await events.listen(response)
        failed = events.events.pop()
        assert (failed.kind, failed.id) == ("response.failed", "")
        assert failed.json["response"]["status"] == "failed"
        assert failed.json["response"]["error"]["code"] == "unavailable"
        world.target.gate.open()
        begun = deltas(events)
        assert begun
        after = {"stream": "true", "starting_after": str(failed.json["sequence_number"])}
        rest = Events()
        async with other.raw.stream("GET", f"{PATH}/resp_{events.session_id}", params=after) as response:
            await rest.listen(response)
        await other.resume(events)
        whole = await respond(other, max_output_tokens=300)
    assert deltas(events) == text_of(whole)
    assert numbers(events) == sorted(set(numbers(events)))
    assert begun + deltas(rest) == text_of(whole)


async def test_a_failed_response_tells_no_token_that_is_not_logged(
    frail_world: World, own_store: Server
) -> None:
    gateway = await frail_world.gateway(http_port=0, store_timeout_s=0.2)
    frail_world.target.gate.close_after(2)
    events = Events()
    async with http_client(gateway.http) as client, client.open(PATH, BODY) as response:
        await frail_world.target.waits_after(2)
        own_store.pause()
        frail_world.target.gate.open()
        await events.listen(response)
    own_store.go_on()
    failed = events.events.pop()
    assert failed.kind == "response.failed"
    assert failed.json["response"]["error"]["code"] == "unavailable"
    assert failed.json["response"]["output"] == []


async def test_openais_client(openai_client: openai.AsyncOpenAI) -> None:
    responses, more = openai_client.responses, {"seed": SEED, "ignore_eos": True}
    whole = await responses.create(
        model="tiny", input=PROMPT, max_output_tokens=MAX_TOKENS, top_logprobs=1, extra_body=more
    )
    assert whole.usage is not None
    assert whole.usage.output_tokens == MAX_TOKENS
    stream = await responses.create(
        model="tiny",
        input=[{"role": "user", "content": [{"type": "input_text", "text": PROMPT}]}],
        max_output_tokens=MAX_TOKENS,
        stream=True,
        extra_body=more,
    )
    text, last = "", None
    async for event in stream:
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.incomplete":
            last = event.response
    assert text == whole.output_text
    assert last is not None
    assert last.output_text == text
    again = await responses.retrieve(last.id)
    assert again.output_text == text
    rest = await responses.retrieve(last.id, stream=True, starting_after=3)
    assert (
        "".join([event.delta async for event in rest if event.type == "response.output_text.delta"]) == text
    )
    further = await responses.create(
        model="tiny", input="Go on.", previous_response_id=last.id, max_output_tokens=5, extra_body=more
    )
    assert further.previous_response_id == last.id
    assert (await responses.cancel(further.id)).status == "incomplete"
    items = [item async for item in responses.input_items.list(further.id, limit=1)]
    assert [getattr(item, "role", "") for item in items] == ["user", "assistant", "user"]
    await responses.delete(further.id)
    with pytest.raises(openai.NotFoundError):
        await responses.retrieve(further.id)
    with pytest.raises(openai.BadRequestError) as refused:
        await responses.create(model="tiny", input=PROMPT, reasoning={"effort": "high"})
    assert (refused.value.param, refused.value.code) == ("reasoning", "unsupported_parameter")
    async with responses.stream(model="tiny", input=PROMPT, max_output_tokens=9, extra_body=more) as helper:
        kinds = [event.type async for event in helper]
    assert kinds[-1] == "response.incomplete"


async def test_openais_sync_client(gateway: Gateway) -> None:
    def call() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"http://{gateway.http}/v1", api_key="none") as client:
            more = {"seed": SEED, "ignore_eos": True}
            stream = client.responses.create(
                model="", input=PROMPT, max_output_tokens=MAX_TOKENS, stream=True, extra_body=more
            )
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            whole = client.responses.create(
                model="", input=PROMPT, max_output_tokens=MAX_TOKENS, extra_body=more
            )
            return text, whole.output_text

    text, whole = await asyncio.to_thread(call)
    assert text == whole != ""

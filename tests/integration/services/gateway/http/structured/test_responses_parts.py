"""Responses with reasoning and calls: their items, their events, and how they go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes import tokenizer_files
from tests.fakes.http_client import Events, HttpClient, http_client
from tests.fakes.redis_servers import Server
from tests.fakes.structured import Answers
from tests.fakes.world import Gateway, World
from tests.integration.services.gateway.conftest import a_world
from tests.integration.services.gateway.http.structured.test_tools import CALL, OTHER, WEATHER

PATH = "/v1/responses"
TOOL = {"type": "function", **WEATHER["function"]}
NOW = {"type": "function", "name": "now"}
BODY: dict[str, Any] = {"input": "Weather?", "seed": 0, "max_output_tokens": 400, "tools": [TOOL, NOW]}
CALL_BEGINS = '<tool_call>\n{"name": "get_weather", "arguments": '
ANSWER = f"<think>\nWhere?\n</think>\n\nLet me look.\n{CALL}\n{OTHER}"


def assembled(events: Events) -> list[dict[str, Any]]:
    """Return the items that the deltas of a stream come to."""
    items: list[dict[str, Any]] = []
    for event in events.events:
        body = event.json
        match event.kind.removeprefix("response."):
            case "output_item.added":
                assert body["output_index"] == len(items)
                items.append(body["item"] | {"text": ""})
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                items[body["output_index"]]["text"] += body["delta"]
    return items


async def test_items_of_a_whole_response(client: HttpClient, answers: Answers) -> None:
    answers.write(ANSWER)
    whole = (await client.post(PATH, BODY)).json()
    reasoning, message, first, second = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Where?"}]
    assert message["content"][0]["text"] == "Let me look."
    assert (first["type"], first["name"]) == ("function_call", "get_weather")
    assert json.loads(first["arguments"]) == {"city": "Orlé", "days": 2}
    assert (second["name"], second["arguments"]) == ("now", "{}")
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert (whole["status"], whole["tools"], whole["tool_choice"]) == ("completed", [TOOL, NOW], "auto")
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > len("Where?")
    kept = (await client.raw.get(f"{PATH}/{whole['id']}")).json()
    assert kept["output"] == whole["output"]


async def test_events_of_a_response(client: HttpClient, answers: Answers) -> None:
    answers.write(ANSWER)
    whole = (await client.post(PATH, BODY)).json()
    events = await client.stream(PATH, BODY)
    numbers = [event.json["sequence_number"] for event in events.events]
    assert numbers == sorted(set(numbers))
    assert [event.json["type"] for event in events.events] == [event.kind for event in events.events]
    items = assembled(events)
    assert [item["text"] for item in items] == [
        "Where?",
        "Let me look.",
        *(item["arguments"] for item in whole["output"][2:]),
    ]
    done = [event.json["item"] for event in events.events if event.kind == "response.output_item.done"]
    last = events.events[-1]
    assert last.kind == "response.completed"
    assert last.json["response"]["output"] == done
    ids = ("id", "call_id", "item_id")
    assert [{k: v for k, v in item.items() if k not in ids} for item in done] == [
        {k: v for k, v in item.items() if k not in ids} for item in whole["output"]
    ]


async def test_events_and_responses_have_their_tokens(world: World, answers: Answers) -> None:
    first = await world.gateway(draft="none", http_port=0)
    second = await world.gateway(draft="none", http_port=0)
    answers.write(ANSWER)
    body = BODY | {"return_token_ids": True}
    async with http_client(first.http) as client, http_client(second.http) as other:
        whole = (await client.post(PATH, body)).json()
        assert len(whole["token_ids"]) == whole["usage"]["output_tokens"]
        assert whole["from_draft"] == [False] * len(whole["token_ids"])
        assert (await other.raw.get(f"{PATH}/{whole['id']}")).json()["token_ids"] == whole["token_ids"]
        events = await client.stream(PATH, body)
        assert tokens_of(events) == (whole["token_ids"], whole["from_draft"])
        for read in range(1, len(events.events), 7):
            begun = events.events[:read]
            again = await other.resume(Events(list(begun), begun[-1].id, events.session_id))
            assert tokens_of(again) == tokens_of(events), begun[-1].id
        assert "token_ids" not in (await client.post(PATH, BODY)).json()


def tokens_of(events: Events) -> tuple[list[int], list[bool]]:
    ids, from_draft = (
        [one for event in events.events for one in event.json.get(name, ())]
        for name in ("token_ids", "from_draft")
    )
    return ids, from_draft


@pytest.mark.parametrize("stop", [None, ["b X", "}}\nX"]])
async def test_a_stream_goes_on_after_any_event(
    world: World, answers: Answers, stop: list[str] | None
) -> None:
    first = await world.gateway(draft="none", http_port=0)
    second = await world.gateway(draft="none", http_port=0)
    answers.write(f"<think>a</think>b {CALL}{OTHER}c")
    async with http_client(first.http) as client, http_client(second.http) as other:
        whole = await client.stream(PATH, BODY | {"top_logprobs": 1, "stop": stop})
        reasoning, message, *calls, last = [item["text"] for item in assembled(whole)]
        assert (reasoning, message, last, len(calls)) == ("a", "b", "c", 2)
        response = whole.events[-1].json["response"]
        for read in range(1, len(whole.events), 3):
            begun = whole.events[:read]
            again = await other.resume(Events(list(begun), begun[-1].id, whole.session_id))
            assert [item["text"] for item in assembled(again)] == [item["text"] for item in assembled(whole)]
            numbers = [event.json["sequence_number"] for event in again.events]
            assert numbers == sorted(set(numbers)), read
            assert again.events[-1].json["response"]["output"] == response["output"]
            number = begun[-1].json["sequence_number"]
            rest = Events(list(begun))
            query = {"stream": "true", "starting_after": str(number)}
            async with other.raw.stream("GET", f"{PATH}/{response['id']}", params=query) as later:
                await rest.listen(later)
            assert [event.kind for event in rest.events] == [event.kind for event in again.events]
        after = {"stream": "true", "starting_after": str(whole.events[-1].json["sequence_number"])}
        assert (await other.raw.get(f"{PATH}/{response['id']}", params=after)).status_code == 204


async def test_a_call_that_a_stop_string_cuts_is_incomplete(client: HttpClient, answers: Answers) -> None:
    answers.write(f"{OTHER}{CALL}")
    body = BODY | {"stop": "2}"}
    whole = (await client.post(PATH, body)).json()
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]
    assert (whole["status"], whole["stop_reason"]) == ("completed", "2}")
    assert (await client.raw.get(f"{PATH}/{whole['id']}")).json()["output"] == whole["output"]
    events = await client.stream(PATH, body)
    streamed = events.events[-1].json["response"]["output"]
    assert [item["status"] for item in streamed] == ["completed", "incomplete"]


@pytest.mark.parametrize("tokens", [4, 20, 40, 75], ids=["reasoning", "message", "name", "arguments"])
async def test_a_stream_goes_on_after_it_has_failed(world: World, answers: Answers, tokens: int) -> None:
    first = await world.gateway(draft="none", http_port=0, drain_timeout_s=0.1)
    second = await world.gateway(draft="none", http_port=0)
    answers.write(ANSWER)
    world.target.gate.close_after(tokens)
    begun, rest = Events(), Events()
    body = BODY | {"return_token_ids": True}
    async with http_client(first.http) as client, http_client(second.http) as other:
        async with client.open(PATH, body) as response:
            await world.target.waits_after(tokens)
            await first.running.stop()
            await begun.listen(response)
        failed = begun.events.pop()
        assert failed.kind == "response.failed"
        assert failed.json["sequence_number"] == begun.events[-1].json["sequence_number"]
        world.target.gate.open()
        after = {"stream": "true", "starting_after": str(failed.json["sequence_number"])}
        async with other.raw.stream("GET", f"{PATH}/resp_{begun.session_id}", params=after) as response:
            await rest.listen(response)
        whole = await other.stream(PATH, body)
    continued = Events([*begun.events, *rest.events])
    assert [item["text"] for item in assembled(continued)] == [item["text"] for item in assembled(whole)]
    assert tokens_of(continued) == tokens_of(whole)


@pytest.mark.parametrize("written", [CALL, CALL_BEGINS + "[1]}\n", CALL_BEGINS + '{"a'])
async def test_a_conversation_with_results(
    client: HttpClient, answers: Answers, world: World, written: str
) -> None:
    answers.write(written)
    first = (await client.post(PATH, BODY)).json()
    [call] = first["output"]
    answers.write("Rain.")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7 mm"}
    kept = await client.post(PATH, BODY | {"previous_response_id": first["id"], "input": [result]})
    sent = await client.post(
        PATH, BODY | {"input": [{"role": "user", "content": "Weather?"}, *first["output"], result]}
    )
    for response in (kept, sent):
        assert response.json()["output"][0]["content"][0]["text"] == "Rain."
    prompts = [
        tuple(item.slice.tokens[: item.slice.prompt_len])
        for item in world.target.calls
        if not item.slice.start
    ]
    assert prompts[-1] == prompts[-2] != prompts[0]
    items = (await client.raw.get(f"{PATH}/{kept.json()['id']}/input_items?order=asc")).json()["data"]
    assert [item["type"] for item in items] == ["message", "function_call", "function_call_output"]
    assert items[1]["arguments"] == call["arguments"]


async def test_a_conversation_goes_on_after_a_call_that_was_cut_off(client: HttpClient) -> None:
    forced = {"tool_choice": {"type": "function", "name": "get_weather"}, "max_output_tokens": 40}
    first = (await client.post(PATH, BODY | forced)).json()
    assert first["status"] == "incomplete"
    [call] = first["output"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(call["arguments"])
    later = await client.post(PATH, BODY | {"previous_response_id": first["id"], "input": "Go on."})
    assert later.status_code == 200, later.text


async def test_a_required_call(client: HttpClient) -> None:
    body = BODY | {"tool_choice": {"type": "function", "name": "get_weather"}}
    [call] = (await client.post(PATH, body)).json()["output"]
    assert call["name"] == "get_weather"
    assert set(json.loads(call["arguments"])) == {"city", "days"}


async def test_wrong_items_are_refused(client: HttpClient) -> None:
    for more, param in (
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tools": [NOW, NOW]}, "tools[1].name"),
    ):
        response = await client.post(PATH, BODY | more)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


async def test_openais_client(gateway: Gateway, answers: Answers) -> None:
    answers.write(ANSWER)
    tools: list[Any] = [TOOL]
    async with (
        openai.AsyncOpenAI(base_url=f"http://{gateway.http}/v1", api_key="none") as client,
        client.responses.stream(
            model="tiny", input="Weather?", tools=tools, extra_body={"seed": 0}
        ) as stream,
    ):
        kinds = {event.type async for event in stream}
        response = await stream.get_final_response()
    assert {"response.function_call_arguments.delta", "response.reasoning_text.delta"} < kinds
    kinds_of_items = [item.type for item in response.output]
    assert kinds_of_items == ["reasoning", "message", "function_call", "function_call"]


async def test_logprobs_are_those_of_the_content(client: HttpClient, answers: Answers) -> None:
    text = "Take <tool  care <tool> of \n\n é <"
    body = BODY | {"top_logprobs": 2}
    for after in ("", CALL):
        answers.write(f"<think>\nWhere?\n</think>\n\n{text}{after}")
        events = await client.stream(PATH, body)
        streamed = [event.json for event in events.events if event.kind == "response.output_text.delta"]
        item = events.events[-1].json["response"]["output"][1]
        [part] = item["content"]
        assert (part["text"], _spelled(part["logprobs"])) == (text, text)
        assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
        assert (await client.post(PATH, body)).json()["output"][1]["content"] == [part]
        assert [entry for delta in streamed for entry in delta["logprobs"]] == part["logprobs"]
        added = [event.json["part"] for event in events.events if event.kind.endswith("part.added")]
        assert [one["logprobs"] for one in added if one["type"] == "output_text"] == [[]]
        done = [event.json for event in events.events if event.kind.endswith(".done")]
        of_message = [event for event in done if event["output_index"] == 1]
        assert [event["type"] for event in of_message] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
        ]
        assert of_message[0]["logprobs"] == part["logprobs"]
        assert (of_message[1]["part"], of_message[2]["item"]) == (part, item)


async def test_logprobs_of_the_content_leave_out_control_tokens(shared_store: Server, tmp_path: Path) -> None:
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer_files.write(tmp_path, tokenizer_files.TOOLS_TEMPLATE, control=marks)
    async with a_world(shared_store, tmp_path, 0) as world:
        answers = Answers(tmp_path)
        world.target.truth = answers.of
        gateway = await world.gateway(http_port=0)
        async with http_client(gateway.http) as client:
            answers.write(f"<think>Where?</think>é <tool_call>x{CALL}é.")
            events = await client.stream(PATH, BODY | {"top_logprobs": 0})
    output = events.events[-1].json["response"]["output"]
    parts = [item["content"][0] for item in output if item["type"] == "message"]
    assert [part["text"] for part in parts] == ["é <tool_call>x", "é."]
    assert [_spelled(part["logprobs"]) for part in parts] == [part["text"] for part in parts]


def _spelled(logprobs: list[dict[str, Any]]) -> str:
    return bytes(byte for entry in logprobs for byte in entry["bytes"]).decode()

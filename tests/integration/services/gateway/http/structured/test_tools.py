"""Calls of tools over HTTP: what the model wrote, as OpenAI's messages and deltas have it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from galley.common.models.tokenizer import Tokenizer
from tests.fakes import tokenizer_files
from tests.fakes.http_client import Events, HttpClient, http_client
from tests.fakes.redis_servers import Server
from tests.fakes.structured import Answers
from tests.fakes.world import Gateway, World
from tests.integration.services.gateway.conftest import a_world

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "seed": 0, "max_tokens": 400}
BODY = {**ASK, "tools": [WEATHER, NOW]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Orlé", "days": 2}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
PATH = "/v1/chat/completions"


def merged(events: Events, index: int = 0) -> dict[str, Any]:
    """Return the message that the deltas of a choice come to, as OpenAI's clients put it together."""
    message: dict[str, Any] = {}
    for choice in events.choices(index):
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
                continue
            calls = message.setdefault("tool_calls", [])
            for part in value:
                if part["index"] == len(calls):
                    assert set(part) == {"index", "id", "type", "function"}
                    calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
                else:
                    assert part["index"] < len(calls)
                    assert set(part["function"]) == {"arguments"}
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message


async def test_a_call_whole_and_streamed(client: HttpClient, answers: Answers) -> None:
    answers.write(f"Let me look.\n{CALL}")
    whole = (await client.post(PATH, BODY)).json()
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "Let me look."
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Orlé", "days": 2}
    streamed = await client.stream(PATH, BODY)
    message = merged(streamed)
    assert message["content"] == "Let me look."
    assert message["tool_calls"][0]["function"] == call["function"]
    assert streamed.finish_reasons() == ["tool_calls"]


async def test_the_tokens_of_tools_are_counted(client: HttpClient, answers: Answers) -> None:
    answers.write("None.")
    usage = (await client.post(PATH, BODY)).json()["usage"]
    asked = {"messages": BODY["messages"], "tools": BODY["tools"]}
    assert (await client.post("/tokenize", asked)).json()["count"] == usage["prompt_tokens"]
    refused = await client.post("/tokenize", {"prompt": "x", "tools": BODY["tools"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


async def test_a_conversation_goes_on_after_a_call_of_no_tool(client: HttpClient, answers: Answers) -> None:
    answers.write(CALL.replace("get_weather", "get weather"), "Sorry.")
    [choice] = (await client.post(PATH, BODY)).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get weather"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "There is no such tool."}
    body = {**BODY, "messages": [*BODY["messages"], choice["message"], result]}
    assert (await client.post(PATH, body)).status_code == 200


async def test_arguments_are_streamed_as_they_are_written(world: World, answers: Answers) -> None:
    gateway = await world.gateway(draft="none", http_port=0)
    answers.write(CALL)
    world.target.gate.close_after(CALL.index("Orl") - len("<tool_call>") + 1)  # the mark is one token
    events = Events()
    async with http_client(gateway.http) as client, client.open(PATH, BODY) as response:
        while not any(call["function"]["arguments"] for call in merged(events).get("tool_calls", ())):
            await events.listen(response, until=len(events.events) + 1)
        [call] = merged(events)["tool_calls"]
        assert '{"city": "'.startswith(call["function"]["arguments"])
        world.target.gate.open()
        await events.listen(response)
    [call] = merged(events)["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Orlé", "days": 2}


async def test_calls_of_several_choices(client: HttpClient, answers: Answers) -> None:
    answers.write(f"{CALL}\n{OTHER}", "None.")
    body = {**BODY, "n": 2}
    first, second = (await client.post(PATH, body)).json()["choices"]
    assert [call["function"]["name"] for call in first["message"]["tool_calls"]] == ["get_weather", "now"]
    assert first["message"]["content"] is None
    assert (second["message"]["content"], second["finish_reason"]) == ("None.", "stop")
    assert "tool_calls" not in second["message"]
    streamed = await client.stream(PATH, body)
    ids = {call["id"] for call in merged(streamed)["tool_calls"]}
    assert len(ids) == 2
    assert merged(streamed, 1)["content"] == "None."


async def test_reasoning_is_split_from_calls_and_content(client: HttpClient, answers: Answers) -> None:
    answers.write(f"<think>\nWhere? Orlé.\n</think>\n\nSo.\n{CALL}")
    whole = (await client.post(PATH, BODY)).json()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Where? Orlé.", "So.")
    assert len(message["tool_calls"]) == 1
    reasoning = len("<\nWhere? Orlé.\n".encode())  # the mark is one token
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == reasoning
    streamed = await client.stream(PATH, {**BODY, "stream_options": {"include_usage": True}})
    assert merged(streamed)["reasoning_content"] == "Where? Orlé."
    assert merged(streamed)["content"] == "So."
    assert streamed.usage["completion_tokens_details"]["reasoning_tokens"] == reasoning


async def test_a_stream_of_several_choices_goes_on_after_one_has_ended(
    client: HttpClient, answers: Answers
) -> None:
    answers.write("<think>Where?</think>Orlé.", "<think>Why?</think>So.")
    body = {**BODY, "n": 2, "stream_options": {"include_usage": True}}
    whole = await client.stream(PATH, body)
    ended = [read for read, event in enumerate(whole.events, 1) if "!" in event.id]
    assert len(ended) >= 2
    for read in ended:
        begun = whole.events[:read]
        again = await client.resume(Events(list(begun), begun[-1].id, whole.session_id))
        assert [event.data for event in again.events].count("[DONE]") == 1
        assert again.usage == whole.usage
        assert [merged(again, index) for index in range(2)] == [merged(whole, index) for index in range(2)]


async def test_a_spelled_mark_is_text(client: HttpClient, answers: Answers) -> None:
    """The tokenizer has these marks as tokens, and grammars know them by their tokens alone."""
    spelled = f"So.\n{CALL}"
    answers.write(spelled.encode())
    for body in (BODY, {**BODY, "stop": [">>>"]}):
        [choice] = (await client.post(PATH, body)).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": spelled, "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert merged(await client.stream(PATH, body)) == {"role": "assistant", "content": spelled}


async def test_a_spelled_mark_does_not_end_the_reasoning(client: HttpClient, answers: Answers) -> None:
    answers.begin("<think>", b"a </think>{", "</think>")
    body = {**ASK, "structured_outputs": {"regex": "x+y"}}
    message = (await client.post(PATH, body)).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "a </think>{"
    assert re.fullmatch("x+y", message["content"])


async def test_strict_tools_bind_every_call_that_is_read(client: HttpClient, answers: Answers) -> None:
    wrong = '<tool_call>\n{"name": "get_weather", "arguments": {"city": 1}}\n</tool_call>'
    answers.begin(wrong.encode())
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    for seed in range(8):
        body = {**ASK, "seed": seed, "tools": [strict]}
        [choice] = (await client.post(PATH, body)).json()["choices"]
        assert choice["message"]["content"].startswith(wrong)
        calls = choice["message"].get("tool_calls", [])
        for call in calls[: None if choice["finish_reason"] != "length" else -1]:
            assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}


async def test_a_mark_that_a_stop_string_holds_back(client: HttpClient, answers: Answers) -> None:
    answers.write(f"<think>a</think><think>b{CALL}", "<think>a</think>")
    body = {**BODY, "n": 2, "stop": [">>>", "nk>\n"]}
    expected = [{"reasoning_content": "a", "content": "<think>b"}, {"reasoning_content": "a", "content": ""}]
    first, second = (await client.post(PATH, body)).json()["choices"]
    for choice, parts in zip((first, second), expected, strict=True):
        assert choice["message"]["reasoning_content"] == parts["reasoning_content"]
        assert choice["message"]["content"] == parts["content"]
    assert [call["function"]["name"] for call in first["message"]["tool_calls"]] == ["get_weather"]
    streamed = await client.stream(PATH, body)
    assert merged(streamed)["content"] == "<think>b"
    assert merged(streamed)["tool_calls"][0]["function"] == first["message"]["tool_calls"][0]["function"]
    assert merged(streamed, 1)["reasoning_content"] == "a"


async def test_without_tools_a_call_is_text(client: HttpClient, answers: Answers) -> None:
    answers.write("<think>a</think>{}")
    cases: list[dict[str, Any]] = [{}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}]
    for more in cases:
        message = (await client.post(PATH, {**ASK, **more})).json()["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "{}", "reasoning_content": "a", "refusal": None}


async def test_a_call_that_is_cut_off(client: HttpClient, answers: Answers) -> None:
    answers.write(CALL)
    [choice] = (await client.post(PATH, {**BODY, "max_tokens": 52})).json()["choices"]
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert '{"city": "Orlé", "days": 2}'.startswith(call["function"]["arguments"])
    assert len(call["function"]["arguments"]) > 2


@pytest.mark.parametrize(
    ("stop", "reason", "arguments"),
    [
        ({"stop": "2}"}, "stop", '{"city": "Orlé", "days": '),
        ({"stop_token_ids": [ord("2")]}, "stop", '{"city": "Orlé", "days": '),
        ({"stop": ": {"}, "stop", None),
        ({"stop": "2}}\nX"}, "tool_calls", '{"city": "Orlé", "days": 2}'),
        ({"stop": "}\n"}, "tool_calls", '{"city": "Orlé", "days": 2}'),
    ],
)
async def test_a_stop_in_a_call(
    client: HttpClient, answers: Answers, stop: dict[str, Any], reason: str, arguments: str | None
) -> None:
    answers.write(CALL)
    body = {**BODY, **stop}
    [choice] = (await client.post(PATH, body)).json()["choices"]
    assert choice["finish_reason"] == reason
    calls = choice["message"].get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == ([] if arguments is None else [arguments])
    streamed = await client.stream(PATH, body)
    assert streamed.finish_reasons() == [reason]
    functions = [call["function"] for call in merged(streamed).get("tool_calls", [])]
    assert functions == [call["function"] for call in calls]


@pytest.mark.parametrize(
    "arguments", ['"5\\" pipe ["}', '{"a": {"b": 1}'], ids=["a text", "brackets too few"]
)
async def test_a_call_that_the_model_ended_is_whole(
    client: HttpClient, answers: Answers, arguments: str
) -> None:
    answers.write(f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}</tool_call>')
    [choice] = (await client.post(PATH, BODY)).json()["choices"]
    assert [call["type"] for call in choice["message"]["tool_calls"]] == ["function"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("n", "stop"), [(1, ()), (2, ()), (2, (",\nX", "So.X", "}}\nX"))])
async def test_a_stream_goes_on_after_any_event(
    world: World, answers: Answers, n: int, stop: Sequence[str]
) -> None:
    first = await world.gateway(draft="none", http_port=0)
    second = await world.gateway(draft="none", http_port=0)
    answers.write(f"<think>Why?</think>Well,\n{CALL}{OTHER}  ", f"So.{OTHER}")
    async with http_client(first.http) as client, http_client(second.http) as other:
        whole = await client.stream(PATH, {**BODY, "n": n, "stop": stop})
        assert merged(whole)["content"] == "Well,"
        for read in range(1, len(whole.events) - 1, 5):
            begun = whole.events[:read]
            again = await other.resume(Events(list(begun), begun[-1].id, whole.session_id))
            for index in range(n):
                assert merged(again, index) == merged(whole, index), read
                assert again.finish_reasons(index) == ["tool_calls"]


async def test_the_conversation_goes_on_with_the_results(
    client: HttpClient, answers: Answers, world: World, tokenizer: Path
) -> None:
    answers.begin("Rain.")
    arguments = {"city": "Orlé", "days": 2}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": json.dumps(arguments)},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "7 mm"},
    ]
    body = {
        **ASK,
        "messages": turns,
        "tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}],
    }
    message = (await client.post(PATH, body)).json()["choices"][0]["message"]
    assert message["content"].startswith("Rain.")
    call = {"type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    expected = Tokenizer.load(str(tokenizer)).encode_chat(
        [turns[0], {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", **call}]}, turns[2]],
        tools=[WEATHER],
    )
    slices = [item.slice for item in world.target.calls if item.slice.start == 0]
    assert list(slices[0].tokens[: slices[0].prompt_len]) == expected


async def test_half_a_surrogate_pair_in_arguments_goes_on(client: HttpClient, answers: Answers) -> None:
    """A model may write one as an escape, and where a call is streamed it reaches the client."""
    answers.write(CALL.replace("Orlé", r"\ud83d"), "Rain.")
    [choice] = (await client.post(PATH, BODY)).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert r"\ud83d" in call["function"]["arguments"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
    turns = [*ASK["messages"], choice["message"], result]
    response = await client.post(PATH, {**BODY, "messages": turns, "seed": 1})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "Rain."
    prompt = (await client.post("/tokenize", {"messages": turns})).json()["tokens"]
    assert r'"city": "\ud83d"' in bytes(token for token in prompt if token < 256).decode()


DEEP = '{"a": ' * 65 + "1" + "}" * 65
NO_OBJECTS = {
    "a list": ("[1]}\n</tool_call>", "[1]"),
    "damaged": ('{"city": Orlé}}\n</tool_call>', '{"city": '),
    "cut off": ('{"city": "Or', '{"city": "Or'),
    "deep": (f"{DEEP}}}\n</tool_call>", DEEP),
}


@pytest.mark.parametrize(("written", "arguments"), NO_OBJECTS.values(), ids=NO_OBJECTS)
async def test_a_conversation_goes_on_after_arguments_that_are_no_object(
    client: HttpClient, answers: Answers, written: str, arguments: str
) -> None:
    answers.write(f'<tool_call>\n{{"name": "get_weather", "arguments": {written}', "Rain.")
    body = {**BODY, "max_tokens": 700}
    [choice] = (await client.post(PATH, body)).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == arguments
    result = {"role": "tool", "tool_call_id": call["id"], "content": "These are no arguments."}
    turns = [*ASK["messages"], choice["message"], result]
    response = await client.post(PATH, {**BODY, "messages": turns, "seed": 1})
    assert response.status_code == 200, response.text
    prompt = (await client.post("/tokenize", {"messages": turns})).json()["tokens"]
    assert f'"arguments": {json.dumps(arguments)}' in bytes(token for token in prompt if token < 256).decode()


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", "must be unique"),
    ({"tools": [{"type": "code"}]}, "tools[0].type", "must be 'function'"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
    ({"tools": [NOW] * 129}, "tools", "must have at most 128 entries, got 129"),
    ({"tool_choice": "required"}, "tool_choice", "must be absent without tools"),
    (
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice.function.name",
        "must be the name of a tool",
    ),
    ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "must be"),
    ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content", "must be text"),
]


@pytest.mark.parametrize(("more", "param", "problem"), REFUSED, ids=[f"{it[1]}: {it[2]}" for it in REFUSED])
async def test_wrong_tools_are_refused(
    client: HttpClient, more: dict[str, Any], param: str, problem: str
) -> None:
    response = await client.post(PATH, {**ASK, **more})
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["param"], problem in error["message"]) == (param, True), error


@pytest.fixture
async def plain_client(shared_store: Server, tmp_path: Path) -> AsyncIterator[HttpClient]:
    """A client of a model whose template takes no tools."""
    tokenizer_files.write(tmp_path)
    async with a_world(shared_store, tmp_path, 0) as world:
        gateway: Gateway = await world.gateway(http_port=0)
        async with http_client(gateway.http) as client:
            yield client


async def test_a_model_without_tools_refuses_them(plain_client: HttpClient) -> None:
    response = await plain_client.post(PATH, BODY)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "tools: must be absent: the model's chat template takes no tools"
    )


async def test_a_model_without_tools_refuses_calls_of_earlier_turns(plain_client: HttpClient) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    response = await plain_client.post(PATH, {"messages": turns})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages[1].tool_calls")

"""Answers of a given language over HTTP: parameters, answers, and what is refused before any work."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, ConfigDict, Field

from tests.fakes.http_client import Events, HttpClient, http_client
from tests.fakes.structured import Answers
from tests.fakes.world import Gateway, World
from tests.integration.services.gateway.http.structured.test_tools import NOW, WEATHER, merged

CHATS, TEXTS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "seed": 3, "max_tokens": 400}
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Weather?"}]


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=8)
    days: Literal[1, 2, 3]


SCHEMA = Weather.model_json_schema()


@pytest.mark.parametrize(
    ("given", "form"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}},
            r'\{"city": "[^"]{0,8}", "days": [123]\}',
        ),
        ({"response_format": {"type": "json_object"}}, r"\{.*\}"),
        ({"structured_outputs": {"json": SCHEMA}}, r'\{"city": "[^"]{0,8}", "days": [123]\}'),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, r'\{"city": "[^"]{0,8}", "days": [123]\}'),
        ({"structured_outputs": {"json": {}}}, r".+"),
        ({"structured_outputs": {"regex": "a+b", "disable_any_whitespace": True}}, "a+b"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, "x[0-9]{2}"),
        ({"structured_outputs": {"json_object": True}}, r"\{.*\}"),
        (
            {"structured_outputs": {"structural_tag": '{"format": {"type": "regex", "pattern": "u+"}}'}},
            "u+",
        ),
        ({"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "u+"}}}, "u+"),
    ],
)
async def test_an_answer_is_of_the_language(client: HttpClient, given: dict[str, Any], form: str) -> None:
    [choice] = (await client.post(CHATS, {**ASK, **given})).json()["choices"]
    text = choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(form, text), text
    streamed = await client.stream(CHATS, {**ASK, **given, "n": 2})
    assert merged(streamed)["content"] == text
    assert re.fullmatch(form, merged(streamed, 1)["content"])
    completed = (await client.post(TEXTS, {"prompt": "x", "seed": 3, "max_tokens": 400, **given})).json()
    assert re.fullmatch(form, completed["choices"][0]["text"])


@pytest.mark.parametrize("given", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
async def test_a_text_has_any_language(client: HttpClient, answers: Answers, given: dict[str, Any]) -> None:
    answers.write("Any.")
    [choice] = (await client.post(CHATS, {**ASK, **given})).json()["choices"]
    assert choice["message"]["content"] == "Any."


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "must be"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be given"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.schema",
        "must be given",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
        "response_format.json_schema.schema",
        "nothing",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "must have one of json, regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "got 2"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "must be a grammar"),
    ({"structured_outputs": {"regex": "a" * 9000}}, "structured_outputs.regex", "at most 8192 bytes"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 1000 entries"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "must be JSON"),
    (
        {"structured_outputs": {"whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        "is not supported",
    ),
    (
        {"structured_outputs": {"regex": "a", "whitespace_flexible": 0}},
        "structured_outputs.whitespace_flexible",
        "is not supported",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "must be absent with response_format",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "ignore_eos": True},
        "ignore_eos",
        "unset with structured_outputs.regex",
    ),
    (
        {"response_format": {"type": "json_object"}, "min_tokens": 1},
        "min_tokens",
        "unset with response_format,",
    ),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "is not supported"),
    ({"prediction": {"type": "audio", "content": "x"}}, "prediction.type", "must be"),
    (
        {"prediction": {"type": "content", "content": [{"type": "image"}]}},
        "prediction.content[0]",
        "must be of type text",
    ),
]


@pytest.mark.parametrize(("more", "param", "problem"), REFUSED, ids=[f"{it[1]}: {it[2]}" for it in REFUSED])
async def test_wrong_languages_are_refused_by_name(
    client: HttpClient, world: World, more: dict[str, Any], param: str, problem: str
) -> None:
    for body in ({"stream": False}, {"stream": True}):
        response = await client.post(CHATS, {**ASK, **more, **body})
        error = response.json()["error"]
        assert response.status_code in {400, 501}
        assert (error["param"], problem in error["message"]) == (param, True), error
    assert not world.target.calls


async def test_a_required_call_is_one_of_the_tools(client: HttpClient) -> None:
    for choice, names in (
        ("required", {"get_weather", "now"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ):
        body = {**ASK, "tools": [WEATHER, NOW], "tool_choice": choice, "parallel_tool_calls": False}
        message = (await client.post(CHATS, body)).json()["choices"][0]["message"]
        [call] = message["tool_calls"]
        assert message["content"] is None
        assert call["function"]["name"] in names
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "get_weather":
            Weather.model_validate(arguments)
        streamed = await client.stream(CHATS, body)
        assert merged(streamed)["tool_calls"][0]["function"] == call["function"]
        assert streamed.finish_reasons() == ["tool_calls"]


async def test_the_language_begins_after_the_reasoning(client: HttpClient, answers: Answers) -> None:
    answers.begin("<think>{ Why? }</think>")
    body = {**ASK, "structured_outputs": {"regex": "a+b"}}
    message = (await client.post(CHATS, body)).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "{ Why? }"
    assert re.fullmatch("a+b", message["content"])
    called = (await client.post(CHATS, {**ASK, "tools": [WEATHER], "tool_choice": "required"})).json()
    message = called["choices"][0]["message"]
    assert message["reasoning_content"] == "{ Why? }"
    Weather.model_validate_json(message["tool_calls"][0]["function"]["arguments"])


async def test_a_call_or_a_json_answer(client: HttpClient) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    body = {**ASK, "tools": [WEATHER], "response_format": schema}
    kinds = set()
    for seed in range(12):
        [choice] = (await client.post(CHATS, {**body, "seed": seed})).json()["choices"]
        message = choice["message"]
        kinds.add(choice["finish_reason"])
        texts = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        for text in texts or [message["content"]]:
            Weather.model_validate_json(text)
    assert kinds == {"stop", "tool_calls"}


async def test_strict_tools_bind_calls_amid_text(client: HttpClient, world: World) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    arguments = []
    for seed in range(6):
        body = {**ASK, "seed": seed, "tools": [strict, NOW]}
        [choice] = (await client.post(CHATS, body)).json()["choices"]
        calls = choice["message"].get("tool_calls", ())[: None if choice["finish_reason"] != "length" else -1]
        functions = [call["function"] for call in calls]
        arguments += [one["arguments"] for one in functions if one["name"] == "get_weather"]
    assert arguments
    for text in arguments:
        Weather.model_validate_json(text)
    tags = [item.slice.structured_output for item in world.target.calls if item.slice.start == 0]
    assert all(json.loads(tag.structural_tag)["format"]["type"] == "triggered_tags" for tag in tags)
    wrong = {**WEATHER, "function": {"name": "f", "strict": True, "parameters": {"type": "nothing"}}}
    error = (await client.post(CHATS, {**ASK, "tools": [wrong]})).json()["error"]
    assert error["param"] == "tools[0].function.parameters"


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": ["array", "null"]}, "must have type object, got ['array', 'null']"),
        ({"minProperties": 5}, "minProperties must be at most one more than the 0 required, got 5"),
        ({"properties": {"a": {"minProperties": 5}}}, "properties.a: minProperties must be"),
        ({"not": {}}, 'not: must be a grammar that can be compiled, got: Unimplemented keys: ["not"]'),
        (
            {"properties": {"a": {"type": "nothing"}}},
            "properties.a.type: must be a grammar that can be compiled, got: Invalid type: nothing",
        ),
    ],
    ids=["type", "whole", "part", "uncompilable", "an uncompilable part"],
)
async def test_a_refused_tool_is_named(client: HttpClient, schema: dict[str, Any], problem: str) -> None:
    function = {"name": "f", "strict": True, "parameters": schema}
    named = {"type": "function", "function": {"name": "f"}}
    answer = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    body = {**ASK, "tools": [NOW, {"type": "function", "function": function}]}
    required = [{"tool_choice": choice} for choice in ("required", named)]
    bodies = [body, *(body | more for more in required), body | {"response_format": answer}]
    responses = [await client.post(CHATS, one) for one in bodies]
    flat = [{"type": "function", **tool} for tool in ({"name": "now"}, function)]
    responses.append(await client.post("/v1/responses", {"input": "x", "tools": flat}))
    for response in responses:
        place = "tools[1].parameters" if response is responses[-1] else "tools[1].function.parameters"
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, place), error
        assert error["message"].startswith(f"{place}: {problem}")
        assert "part_" not in error["message"]


async def test_a_refused_answer_beside_calls_is_named(client: HttpClient) -> None:
    for schema, problem in (
        ({"type": "nothing"}, "type: must be a grammar that can be compiled, got: Invalid type: nothing"),
        ({"minProperties": 5}, "minProperties must be"),
    ):
        wrong = {"type": "json_schema", "json_schema": {"schema": schema}}
        body = {**ASK, "tools": [WEATHER], "response_format": wrong}
        error = (await client.post(CHATS, body)).json()["error"]
        assert error["param"] == "response_format.json_schema.schema"
        assert error["message"].startswith(f"{error['param']}: {problem}")
    long = {**ASK, "tools": [WEATHER], "structured_outputs": {"regex": "a" * 9000}}
    assert (await client.post(CHATS, long)).json()["error"]["param"] == "structured_outputs.regex"


async def test_schemas_of_tools_that_are_too_large_are_named(world: World) -> None:
    gateway = await world.gateway(http_port=0, max_message_bytes=1 << 20)
    large = {"description": "x" * 33_000}
    tools = [{"type": "function", "function": {"name": name, "parameters": large}} for name in "fg"]
    body = {**ASK, "tools": tools, "response_format": {"type": "json_object"}}
    async with http_client(gateway.http) as client:
        error = (await client.post(CHATS, body)).json()["error"]
    assert error["param"] == "tools"


@pytest.mark.parametrize("schema", ['{"const": "\\ud800"}', '{"a": ' + "[" * 980 + "]" * 980 + "}"])
async def test_a_schema_beside_calls_is_bounded(client: HttpClient, schema: str) -> None:
    body = {**ASK, "tools": [WEATHER], "structured_outputs": {"json": schema}}
    response = await client.post(CHATS, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "structured_outputs.json")


async def test_a_language_that_cannot_stand_beside_calls_is_refused(client: HttpClient) -> None:
    body = {**ASK, "tools": [WEATHER], "structured_outputs": {"choice": ["a"]}}
    error = (await client.post(CHATS, body)).json()["error"]
    assert error["param"] == "structured_outputs.choice"


async def test_a_constrained_stream_goes_on_at_another_gateway(world: World) -> None:
    first = await world.gateway(draft="none", http_port=0)
    second = await world.gateway(draft="none", http_port=0)
    body = {**ASK, "tools": [WEATHER], "tool_choice": "required"}
    async with http_client(first.http) as client, http_client(second.http) as other:
        whole = await client.stream(CHATS, body)
        world.target.gate.close_after(50)  # tokens: within the arguments
        events = Events()
        async with client.open(CHATS, body) as response:
            await events.listen(response, until=2)
            await first.running.stop()
            await events.listen(response)
        events.events.pop()
        world.expect_error("")
        world.target.gate.open()
        again = await other.resume(events)
    assert merged(again)["tool_calls"][0]["function"] == merged(whole)["tool_calls"][0]["function"]


@pytest.mark.parametrize("parts", [False, True])
async def test_a_prediction_is_counted(client: HttpClient, answers: Answers, *, parts: bool) -> None:
    text = "The quick brown fox jumps over the lazy dog."
    answers.write(text)
    content = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}] if parts else text
    body = {**ASK, "prediction": {"type": "content", "content": content}}
    whole = (await client.post(CHATS, body)).json()
    assert whole["choices"][0]["message"]["content"] == text
    details = whole["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (len(text), 0)


async def test_a_prediction_longer_than_the_context_is_refused(world: World) -> None:
    gateway = await world.gateway(http_port=0, max_message_bytes=1 << 20)
    prediction = {"type": "content", "content": "x" * (1 << 16)}
    async with http_client(gateway.http) as client:
        error = (await client.post(CHATS, {**ASK, "prediction": prediction})).json()["error"]
    assert error["param"] == "prediction.content"
    assert error["message"].startswith("prediction.content: must have at most 65535 tokens")
    assert not world.target.calls


async def test_responses_have_a_text_format(client: HttpClient) -> None:
    form = {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}
    body = {"input": "Weather?", "seed": 3, "max_output_tokens": 400, "text": {"format": form}}
    whole = (await client.post(RESPONSES, body)).json()
    Weather.model_validate_json(whole["output"][0]["content"][0]["text"])
    assert whole["text"]["format"] == form
    refused = await client.post(RESPONSES, {**body, "text": {"format": {**form, "schema": {"type": "x"}}}})
    assert refused.json()["error"]["param"] == "text.format.schema"
    refused = await client.post(RESPONSES, {**body, "text": {"format": {"type": "json_schema"}}})
    assert refused.json()["error"]["param"] == "text.format.schema"


# ------------------------------------------------------------------------------- OpenAI's client --


async def test_openais_client_parses_answers_and_calls(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://{gateway.http}/v1", api_key="none") as client:
        parsed = await client.beta.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Weather, seed=3
        )
        assert isinstance(parsed.choices[0].message.parsed, Weather)
        called = await client.beta.chat.completions.parse(
            model="tiny",
            messages=MESSAGES,
            tools=[openai.pydantic_function_tool(Weather)],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=3,
        )
        [call] = called.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)
        async with client.beta.chat.completions.stream(
            model="tiny",
            messages=MESSAGES,
            tools=[openai.pydantic_function_tool(Weather)],
            tool_choice="required",
            parallel_tool_calls=False,
            seed=3,
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in kinds
        [streamed] = final.choices[0].message.tool_calls or []
        assert streamed.function.parsed_arguments == call.function.parsed_arguments
        response = await client.responses.parse(model="tiny", input="Weather?", text_format=Weather)
        assert isinstance(response.output_parsed, Weather)

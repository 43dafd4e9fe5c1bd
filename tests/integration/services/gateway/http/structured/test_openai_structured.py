"""OpenAI's own client: parsed answers, calls, reasoning and predictions, as its users write them."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Any, Literal

import openai
import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from tests.fakes.structured import Answers
from tests.integration.services.gateway.http.structured.test_structured import MESSAGES, Weather
from tests.integration.services.gateway.http.structured.test_tools import CALL, NOW, OTHER, WEATHER

ARGUMENTS = {"city": "Orlé", "days": 2}


class Unit(StrEnum):
    EURO = "EUR"
    YEN = "JPY"


class Price(BaseModel):
    unit: Unit
    cents: int = Field(ge=0, le=99)


class Item(BaseModel):
    """What is bought."""

    name: str = Field(max_length=4, description="Its name.")
    price: Price | None
    of: list[Item] = Field(max_length=1)


class Paid(BaseModel):
    kind: Literal["paid"]
    on: str = Field(pattern=r"^20[0-9]{2}-[01][0-9]$")


class Open(BaseModel):
    kind: Literal["open"]
    is_late: bool


class Order(BaseModel):
    items: list[Item] = Field(min_length=1, max_length=2)
    state: Paid | Open
    rate: float | None = None


async def test_classes_of_many_parts_are_parsed(openai_client: openai.AsyncOpenAI) -> None:
    kinds: set[type] = set()
    for seed in range(8):
        answer = await openai_client.beta.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Order, seed=seed
        )
        order = answer.choices[0].message.parsed
        assert isinstance(order, Order)
        kinds.add(type(order.state))
    assert kinds == {Paid, Open}


async def test_a_parsed_answer_is_streamed(openai_client: openai.AsyncOpenAI) -> None:
    async with openai_client.beta.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Weather, seed=3
    ) as stream:
        partial = [event.parsed async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    weather = final.choices[0].message.parsed
    assert isinstance(weather, Weather)
    assert partial[-1] == weather.model_dump()


async def test_an_answer_that_is_cut_off_is_not_parsed(openai_client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        await openai_client.beta.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Weather, max_tokens=5
        )


async def test_a_schema_that_is_refused_is_named(openai_client: openai.AsyncOpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        await openai_client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=form)
    assert refused.value.param == "response_format.json_schema.schema"


async def test_calls_are_streamed_and_answered(openai_client: openai.AsyncOpenAI, answers: Answers) -> None:
    """The loop of an agent: the model calls, the results are sent, the model answers."""
    answers.write(f"Let me look.\n{CALL}\n{OTHER}")
    messages: list[ChatCompletionMessageParam] = [*MESSAGES]
    tools: list[Any] = [WEATHER, NOW]
    calls: dict[int, dict[str, str]] = {}
    text, reason = "", None
    async for chunk in await openai_client.chat.completions.create(
        model="tiny", messages=messages, tools=tools, seed=0, stream=True
    ):
        [choice] = chunk.choices
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for part in choice.delta.tool_calls or ():
            call = calls.setdefault(part.index, {"id": part.id or "", "name": "", "arguments": ""})
            assert part.function is not None
            call["name"] += part.function.name or ""
            call["arguments"] += part.function.arguments or ""
    assert (text, reason, list(calls)) == ("Let me look.", "tool_calls", [0, 1])
    assert [call["name"] for call in calls.values()] == ["get_weather", "now"]
    assert json.loads(calls[0]["arguments"]) == ARGUMENTS
    assert len({call["id"] for call in calls.values()} - {""}) == 2
    whole = await openai_client.chat.completions.create(model="tiny", messages=messages, tools=tools, seed=0)
    message = whole.choices[0].message
    messages.append(message)  # type: ignore[arg-type]  # as its users do
    calls_made = message.tool_calls or []
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in calls_made]
    answers.write("It rains.")
    after = await openai_client.chat.completions.create(model="tiny", messages=messages, tools=tools, seed=0)
    assert after.choices[0].message.content == "It rains."
    assert after.choices[0].finish_reason == "stop"
    assert after.usage is not None
    assert whole.usage is not None
    assert after.usage.prompt_tokens > whole.usage.prompt_tokens + len("Rain.") * 2


async def test_calls_of_a_response_are_parsed(openai_client: openai.AsyncOpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="get_weather")["function"]
    tools: list[Any] = [{"type": "function", **tool}]
    response = await openai_client.responses.parse(
        model="tiny", input="Weather?", tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    [item] = response.output
    assert item.type == "function_call"
    Weather.model_validate_json(item.arguments)
    follow = await openai_client.responses.create(
        model="tiny",
        input=[{"type": "function_call_output", "call_id": item.call_id, "output": "Rain."}],
        previous_response_id=response.id,
        tools=tools,
        tool_choice="none",
        max_output_tokens=4,
        extra_body={"ignore_eos": True},  # the seed is random, and so is the end
    )
    assert follow.output_text


async def test_calls_of_the_models_choice_are_parsed(
    openai_client: openai.AsyncOpenAI, answers: Answers
) -> None:
    """The client's own helper asks for strict functions, and parses their arguments."""
    answers.begin(CALL)
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    async with openai_client.beta.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=[tool], parallel_tool_calls=False, seed=1
    ) as stream:
        names = [event.name async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()
    [call] = final.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Orlé", days=2)
    assert names == ["get_weather"]


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_apart(
    openai_client: openai.AsyncOpenAI, answers: Answers, *, stream: bool
) -> None:
    answers.write("<think>Where?</think>There.")
    reasoning = content = ""
    usage: CompletionUsage | None = None
    if stream:
        chunks = await openai_client.chat.completions.create(
            model="tiny", messages=MESSAGES, seed=0, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in chunks:
            usage = chunk.usage
            for choice in chunk.choices:
                reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                content += choice.delta.content or ""
    else:
        whole = await openai_client.chat.completions.create(model="tiny", messages=MESSAGES, seed=0)
        usage, message = whole.usage, whole.choices[0].message
        reasoning, content = getattr(message, "reasoning_content", ""), message.content or ""
    assert (reasoning, content) == ("Where?", "There.")
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == len("<Where?")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prediction_is_in_the_usage(
    openai_client: openai.AsyncOpenAI, answers: Answers, *, stream: bool
) -> None:
    answers.write("def f():\n    return 2\n")
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "seed": 0,
        "prediction": {"type": "content", "content": "def f():\n    return 1\n"},
    }
    if stream:
        more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await openai_client.chat.completions.create(**request, **more)]
        usage = chunks[-1].usage
    else:
        usage = (await openai_client.chat.completions.create(**request)).usage
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == 22
    assert details.rejected_prediction_tokens == 1


async def test_a_prediction_of_a_structured_answer(openai_client: openai.AsyncOpenAI) -> None:
    """The prediction changes no token, is counted, and its tokens are drafts."""
    request: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, "seed": 3, "response_format": Weather,
    }  # fmt: skip
    plain = await openai_client.beta.chat.completions.parse(**request)
    text = plain.choices[0].message.content
    prediction: Any = {"type": "content", "content": text}
    predicted = await openai_client.beta.chat.completions.parse(**request, prediction=prediction)
    assert predicted.choices[0].message.content == text
    assert predicted.usage is not None
    details = predicted.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens == len((text or "").encode())

"""Clients that others wrote ask for structured answers and call tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.structured import Answers
from tests.fakes.world import Gateway
from tests.integration.services.gateway.http.structured.test_structured import Weather
from tests.integration.services.gateway.http.test_other_clients import node, python

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Orlé"}}\n</tool_call>'
CITY = {"city": "Orlé"}


@pytest.fixture(autouse=True)
def written(answers: Answers) -> None:
    """Let an answer of any language call the tool; with an even seed, let it reason."""
    answers.write("<think>Where?</think>There.", CALL)


async def test_langchain(gateway: Gateway, clients: Path) -> None:
    received: dict[str, Any] = await python(clients, "langchain_structured.py", gateway)
    structured = received.pop("structured")
    assert isinstance(structured.pop("json_mode"), dict)
    assert set(structured) == {"json_schema", "function_calling", "strict", "dict", "streamed"}
    for value in structured.values():
        Weather.model_validate(value)
    assert received.pop("parts") >= 1
    assert set(received.pop("required")) == {"get_weather"}
    calls = [{"name": "get_weather", "args": CITY}]
    assert received == {
        "tool_calls": calls,
        "streamed": calls,
        "finish": "tool_calls",
        "after_results": calls,
    }


async def test_vercels_ai_sdk(gateway: Gateway, clients: Path) -> None:
    received: dict[str, Any] = await node(clients, "ai_sdk_structured.mjs", gateway)
    objects = received.pop("objects")
    assert len(objects) >= 2
    for value in objects:
        Weather.model_validate(value)
    assert received.pop("word") in {"rain", "sun"}
    assert received.pop("partial") >= 1
    assert received.pop("reasoning_parts") >= 1
    assert received == {
        "any": "object",
        "required": [["get_weather"], ["get_weather"]],
        "reasoned": ["Where?", "There."],
        "reasoning": ["Where?", "There."],
        "reasoning_tokens": len("<Where?"),  # the mark is one token
        "called": [["get_weather", CITY]],
        "finish": "tool-calls",
        "streamed": [["get_weather", CITY]],
        "kinds": ["tool-input-start", "tool-input-delta", "tool-input-end", "tool-call"],
        "steps": 2,
        "results": 4,
    }

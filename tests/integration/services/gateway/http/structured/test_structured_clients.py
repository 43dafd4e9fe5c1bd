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
def call(answers: Answers) -> None:
    """Let an answer of any language call the tool."""
    answers.write(CALL)


async def test_langchain(gateway: Gateway, clients: Path) -> None:
    received: dict[str, Any] = await python(clients, "langchain_structured.py", gateway)
    for method in ("json_schema", "function_calling"):
        Weather.model_validate(received.pop(method))
    assert received.pop("parts") > 1
    calls = [{"name": "get_weather", "args": CITY}]
    assert received == {"tool_calls": calls, "streamed": calls, "finish": "tool_calls"}


async def test_vercels_ai_sdk(gateway: Gateway, clients: Path) -> None:
    received: dict[str, Any] = await node(clients, "ai_sdk_structured.mjs", gateway)
    Weather.model_validate(received.pop("object"))
    assert received == {
        "called": [["get_weather", CITY]],
        "finish": "tool-calls",
        "streamed": [["get_weather", CITY]],
        "kinds": ["tool-input-start", "tool-input-delta", "tool-input-end", "tool-call"],
        "steps": 2,
        "results": 4,
    }

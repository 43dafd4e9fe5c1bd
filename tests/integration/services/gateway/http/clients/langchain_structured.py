"""Ask a gateway for structured answers by langchain-openai, and print what came as JSON: ... URL PROMPT."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """Weather of a city."""

    city: str = Field(max_length=8)
    days: Literal[1, 2, 3]


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return city


def main(url: str, prompt: str) -> dict[str, Any]:
    chat = ChatOpenAI(base_url=url, api_key="none", model="tiny", max_tokens=400, seed=7)
    structured = {
        method: chat.with_structured_output(Weather, method=method).invoke(prompt).model_dump()
        for method in ("json_schema", "function_calling")
    }
    bound = chat.bind_tools([get_weather])
    whole = bound.invoke(prompt)
    streamed = list(bound.stream(prompt))
    total = streamed[0]
    for part in streamed[1:]:
        total += part
    return {
        **structured,
        "tool_calls": [{name: call[name] for name in ("name", "args")} for call in whole.tool_calls],
        "finish": whole.response_metadata["finish_reason"],
        "streamed": [{name: call[name] for name in ("name", "args")} for call in total.tool_calls],
        "parts": sum(bool(part.tool_call_chunks) for part in streamed),
    }


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)

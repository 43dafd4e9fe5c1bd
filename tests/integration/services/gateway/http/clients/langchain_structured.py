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
    bound = chat.bind_tools([get_weather])
    whole = bound.invoke(prompt)
    streamed = list(bound.stream(prompt))
    total = streamed[0]
    for part in streamed[1:]:
        total += part
    results = [{"role": "tool", "content": "Rain.", "tool_call_id": call["id"]} for call in whole.tool_calls]
    required = chat.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False).invoke(prompt)
    return {
        "structured": structured(chat, prompt),
        "tool_calls": calls_of(whole),
        "finish": whole.response_metadata["finish_reason"],
        "streamed": calls_of(total),
        "parts": sum(bool(part.tool_call_chunks) for part in streamed),
        "after_results": calls_of(bound.invoke([("user", prompt), whole, *results])),
        "required": [call["name"] for call in required.tool_calls],
    }


def structured(chat: ChatOpenAI, prompt: str) -> dict[str, Any]:
    """Return answers by a class, by each method, and by its schema alone, whole and streamed."""
    by_schema = chat.with_structured_output(Weather.model_json_schema(), method="json_schema")
    raw = chat.with_structured_output(Weather, strict=True, include_raw=True).invoke(prompt)
    return {
        **{
            method: chat.with_structured_output(Weather, method=method).invoke(prompt).model_dump()
            for method in ("json_schema", "function_calling")
        },
        "strict": raw["parsed"].model_dump(),
        "dict": by_schema.invoke(prompt),
        "streamed": list(by_schema.stream(prompt))[-1],
        "json_mode": chat.with_structured_output(None, method="json_mode").invoke(prompt),
    }


def calls_of(message: Any) -> list[dict[str, Any]]:
    return [{name: call[name] for name in ("name", "args")} for call in message.tool_calls]


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)

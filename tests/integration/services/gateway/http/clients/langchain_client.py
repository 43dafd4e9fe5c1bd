"""Call a gateway by langchain-openai, and print what came as JSON: langchain_client.py URL PROMPT."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from langchain_openai import ChatOpenAI, OpenAI


async def main(url: str, prompt: str) -> dict[str, Any]:
    to: dict[str, Any] = {"base_url": url, "api_key": "none", "model": "tiny", "max_tokens": 40, "seed": 7}
    chat = ChatOpenAI(**to, stream_usage=True)
    whole = chat.invoke(prompt)
    streamed = list(chat.stream(prompt))
    total = streamed[0]
    for part in streamed[1:]:
        total += part
    later = [part.content async for part in chat.astream([("user", prompt)])]
    batch = await chat.abatch([prompt, prompt])
    many = chat.bind(n=2, logprobs=True, top_logprobs=2).invoke(prompt)
    plain = ChatOpenAI(**to, extra_body={"speculation": {"mode": "off"}}).invoke(prompt)
    responses = ChatOpenAI(**{**to, "seed": None}, use_responses_api=True, extra_body={"seed": 7})
    try:
        ChatOpenAI(**{**to, "model": "other"}).invoke(prompt)
        error = ""
    except openai.NotFoundError as refused:
        error = str(refused.code)
    return {
        "chat": whole.content,
        "usage": [whole.usage_metadata, total.usage_metadata],
        "finish": whole.response_metadata["finish_reason"],
        "streamed": total.content,
        "async": "".join(later),
        "batch": [one.content for one in batch],
        "logprobs": len(many.response_metadata["logprobs"]["content"]),
        "plain": plain.content,
        "text": OpenAI(**to).invoke(prompt),
        "parts": len(streamed),
        "responses": [
            responses.invoke(prompt).text,
            "".join(part.text for part in responses.stream(prompt)),
        ],
        "error": error,
    }


if __name__ == "__main__":
    json.dump(asyncio.run(main(*sys.argv[1:])), sys.stdout)

"""Call a gateway by litellm, and print what came as JSON: litellm_client.py URL PROMPT."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm
import openai


async def main(url: str, prompt: str) -> dict[str, Any]:
    to: dict[str, Any] = {"api_base": url, "api_key": "none", "max_tokens": 40, "seed": 7}
    chat: dict[str, Any] = {
        **to,
        "model": "openai/tiny",
        "messages": [{"role": "user", "content": prompt}],
    }
    whole = litellm.completion(**chat, n=2, logprobs=True, top_logprobs=2)
    parts = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    streamed = litellm.stream_chunk_builder(parts)
    later = await litellm.acompletion(**chat, extra_body={"speculation": {"mode": "off"}})
    text = litellm.text_completion(**to, model="text-completion-openai/tiny", prompt=prompt)
    respond: dict[str, Any] = {
        "api_base": url,
        "api_key": "none",
        "model": "openai/tiny",
        "input": prompt,
        "max_output_tokens": 40,
        "extra_body": {"seed": 7},
    }
    response = litellm.responses(**respond)
    events = list(litellm.responses(**respond, stream=True))
    errors = {}
    for wrong in ({"temperature": -1}, {"model": "openai/other"}, {"tools": [{"type": "function"}]}):
        try:
            litellm.completion(**{**chat, **wrong})
        except openai.APIStatusError as error:  # litellm's own errors are of this class
            errors[next(iter(wrong))] = [type(error).__name__, error.status_code]
    return {
        "chat": [choice.message.content for choice in whole.choices],
        "logprobs": len(whole.choices[0].logprobs.content),
        "streamed": streamed.choices[0].message.content,
        "usage": [whole.usage.completion_tokens, streamed.usage.completion_tokens],
        "async": later.choices[0].message.content,
        "text": text.choices[0].text,
        "responses": [
            response.output[0].content[0].text,
            "".join(event.delta for event in events if event.type == "response.output_text.delta"),
        ],
        "errors": errors,
    }


if __name__ == "__main__":
    json.dump(asyncio.run(main(*sys.argv[1:])), sys.stdout)

"""Chat by OpenAI's Python client: python examples/openai_python.py [URL [PROMPT]].

Parameters that only Galley has go into extra_body. The answer is requested again without speculation, which
changes its speed and no word of it. The program needs the client: pip install openai.
"""

import argparse
from typing import Any

from openai import OpenAI


def main(url: str, prompt: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id

    def answer(**extra: Any) -> str:
        text = ""
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=64,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                print(choice.delta.content or "", end="", flush=True)
            if chunk.usage:
                drafting = (chunk.model_extra or {})["metrics"]["speculative_decoding"]
                accepted, total = drafting["num_accepted_tokens"], chunk.usage.completion_tokens
                print(f"\n{total} tokens, {accepted} of them from the draft")
        return text

    first, plain = answer(), answer(speculation={"mode": "off"})
    print("the same seed, plain:", "same text" if plain == first else "OTHER TEXT")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", metavar="URL", nargs="?", default="http://127.0.0.1:8000/v1")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", default="Name three rivers.")
    main(**vars(parser.parse_args()))

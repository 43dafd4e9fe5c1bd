"""Print an answer while it is generated: python examples/stream.py [HOST:PORT [PROMPT]]."""

import sys

from galley import Client


def main(address: str = "127.0.0.1:50051", prompt: str = "The capital of France is") -> None:
    with Client(address) as client, client.stream(prompt, max_tokens=64) as stream:
        for event in stream:
            print(event.chunk.text, end="", flush=True)
        result = stream.result()
    print(f"\n{result.usage.output_tokens} tokens, acceptance rate {result.speculation.acceptance_rate:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

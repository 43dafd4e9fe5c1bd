"""Print an answer while it is generated: python examples/stream.py [HOST:PORT [PROMPT]]."""

import argparse

from galley import Client


def main(address: str, prompt: str) -> None:
    with Client(address) as client, client.stream(prompt, max_tokens=64) as stream:
        for event in stream:
            print(event.chunk.text, end="", flush=True)
        result = stream.result()
    print(f"\n{result.usage.output_tokens} tokens, acceptance rate {result.speculation.acceptance_rate:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", default="The capital of France is")
    main(**vars(parser.parse_args()))

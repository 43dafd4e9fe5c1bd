"""Talk with the model, a line a turn, until the end of the input: python examples/chat.py [HOST:PORT]."""

import argparse
import sys

from galley import Client, GalleyRpcError, Message


def main(address: str) -> None:
    history: list[Message] = []
    with Client(address) as client:
        for line in sys.stdin:
            turns = [*history, Message("user", line.strip())]
            try:
                with client.stream(turns, max_tokens=128, temperature=0.7) as stream:
                    for event in stream:
                        print(event.chunk.text, end="", flush=True)
                    history = [*turns, stream.result().message]
            except GalleyRpcError as error:
                print(f"error: {error}", file=sys.stderr)
            print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT", nargs="?", default="127.0.0.1:50051")
    main(**vars(parser.parse_args()))

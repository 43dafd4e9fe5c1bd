"""Talk with the model, a line a turn, until the end of the input: python examples/chat.py [HOST:PORT]."""

import sys

from galley import Client, GalleyRpcError, Message


def main(address: str = "127.0.0.1:50051") -> None:
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
    main(*sys.argv[1:])

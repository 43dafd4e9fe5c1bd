"""Show what a seed fixes: python examples/seeds.py [HOST:PORT].

A seed gives the same tokens again, with speculation and without. Another seed gives another answer.
"""

import argparse

from galley import Client

PROMPT = "Three names for a ship:"


def main(address: str) -> None:
    with Client(address) as client:
        first = client.generate(PROMPT, max_tokens=32, temperature=1.0)
        again = client.generate(PROMPT, max_tokens=32, temperature=1.0, seed=first.seed)
        plain = client.generate(PROMPT, max_tokens=32, temperature=1.0, seed=first.seed, speculation="off")
        other = client.generate(PROMPT, max_tokens=32, temperature=1.0, seed=first.seed ^ 1)
    print(f"seed {first.seed}, build {first.fingerprint}: {first.text!r}")
    print("the same seed:             ", "same tokens" if again.tokens == first.tokens else "OTHER TOKENS")
    print("the same seed, plain:      ", "same tokens" if plain.tokens == first.tokens else "OTHER TOKENS")
    print("another seed:              ", "same tokens" if other.tokens == first.tokens else "other tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT", nargs="?", default="127.0.0.1:50051")
    main(**vars(parser.parse_args()))

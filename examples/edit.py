"""Edit a file by an instruction: python examples/edit.py HOST:PORT FILE INSTRUCTION > NEW_FILE.

The file is the prediction of the answer: most of its tokens are accepted many at a time.
"""

import argparse
import sys
from pathlib import Path

from galley import Client


def main(address: str, file: str, instruction: str) -> None:
    content = Path(file).read_text()
    prompt = f"{instruction} Write only the complete file.\n\n{content}"
    with Client(address) as client:
        result = client.chat(prompt, prediction=content, max_tokens=512, temperature=0.0)
    print(result.text)
    usage = result.usage
    counts = f"{usage.output_tokens} tokens, {usage.accepted_prediction_tokens} of them as in the file"
    print(f"{counts}, in {result.speculation.rounds} rounds", file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("file", metavar="FILE")
    parser.add_argument("instruction", metavar="INSTRUCTION")
    main(**vars(parser.parse_args()))

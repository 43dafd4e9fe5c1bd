"""Print a long answer that survives kill -9: python examples/resume.py [HOST:PORT,... [STATE]].

The file STATE holds the text so far and the point after it. Kill the program and start it again: it prints
the same answer, and requests only the rest of it. A killed gateway is a pause; name several, so that another
one goes on.
"""

import argparse
import json
from pathlib import Path

from galley import Client

PROMPT = "Once upon a time"


def main(addresses: str, state: str) -> None:
    file, text = Path(state), ""
    with Client(addresses) as client:
        if file.exists():
            saved = json.loads(file.read_text())
            text = saved["text"]
            print(text, end="", flush=True)
            stream = client.resume(
                saved["session_id"], saved["next_index"], bytes.fromhex(saved["seen_hash"])
            )
        else:
            stream = client.stream(PROMPT, max_tokens=256)
        for event in stream:
            text += event.chunk.text
            save(file, {**stream.resume_from()._asdict(), "text": text})
            print(event.chunk.text, end="", flush=True)
    file.unlink(missing_ok=True)
    print()


def save(file: Path, state: dict[str, object]) -> None:
    # Replaced in one step, so that a kill leaves the old state or the new one.
    new = file.with_suffix(".new")
    new.write_text(json.dumps(state, default=bytes.hex))
    new.replace(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("addresses", metavar="HOST:PORT,...", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("state", metavar="STATE", nargs="?", default="answer.json")
    main(**vars(parser.parse_args()))

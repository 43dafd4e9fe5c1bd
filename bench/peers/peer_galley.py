"""Answer blocks of prompts by a target's engine alone, in the protocol of bench/peers/peer_vllm.py.

Its flags are those of a target. A block may also have "drafts": for each prompt and output
position, the draft tokens from there on. Answers then have the numbers of "verified" and "accepted" draft
tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from bench.peers.engine_alone import FREE_ROWS, EngineAlone, Heard
from galley.common.config.settings import parse_settings
from services.target.engine.protocol import Limits
from services.target.loading import load_engine
from services.target.settings import TargetSettings


def answer_block(engine: EngineAlone, block: dict[str, Any]) -> dict[str, Any]:
    """Answer every prompt of a block, `streams` at a time."""
    began_s = time.perf_counter()
    busy_s: float | None = None
    no_drafts = [()] * len(block["prompts"])
    waiting = list(zip(block["prompts"], block["max_tokens"], block.get("drafts", no_drafts), strict=True))
    answers: list[Heard] = []
    while waiting or engine.running:
        while waiting and engine.running < block["streams"]:
            prompt, max_tokens, drafts = waiting.pop(0)
            seed = block["seed"] + len(answers)
            answers.append(engine.add(prompt, max_tokens, block["temperature"], seed, drafts))
        if not waiting and engine.running < block["streams"] and busy_s is None:
            busy_s = time.perf_counter() - began_s
        engine.step()
    wall_s = time.perf_counter() - began_s
    return {
        "answers": [_report(answer, began_s) for answer in answers],
        "wall_s": wall_s,
        "busy_s": wall_s if busy_s is None else busy_s,
    }


def _report(answer: Heard, began_s: float) -> dict[str, Any]:
    return {
        "tokens": answer.tokens,
        "at_s": answer.at_s,
        "began_s": answer.began_s - began_s,
        "verified": answer.verified,
        "accepted": answer.accepted,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Load the model, print a line when it is ready, and answer blocks until standard input ends."""
    given = sys.argv[1:] if argv is None else argv
    settings = parse_settings(TargetSettings, given, "peer_galley", "A target's engine without its service.")
    answers = _keep_standard_output()
    limits = Limits(max_draft_tokens=settings.max_draft_tokens, max_sessions=settings.max_sessions)
    loaded = load_engine(settings)
    engine = EngineAlone(loaded.serve(FREE_ROWS, limits))
    ready = {
        "engine": type(loaded).__name__,
        "fingerprint": loaded.info.fingerprint,
        "dtype": loaded.info.dtype,
    }
    print(json.dumps({"ready": ready}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer_block(engine, json.loads(line))), file=answers, flush=True)
    return 0


def _keep_standard_output() -> TextIO:
    """Return the real standard output; everything else that is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    sys.exit(main())

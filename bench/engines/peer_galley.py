"""Answer blocks of prompts by our engine alone, in the protocol of bench/engines/peer_vllm.py.

A block may also have "drafts": for each prompt and output position, the draft tokens from there on. Answers
then have the numbers of "verified" and "accepted" draft tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from bench.engines.engine_alone import EngineAlone, Heard
from galley.core.kv.table import KvTable
from galley.engine.model import CausalModel
from galley.engine.sampling.draw import warm_up
from services.target.engine.paged.engine import PagedEngine

MAX_SESSIONS = 256


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engine", choices=("paged",), default="paged")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-blocks", type=int, default=1456, help="default: 1 GiB of the default model")
    options = parser.parse_args(argv)
    answers = _keep_standard_output()
    model = CausalModel.load(
        options.model,
        dtype=getattr(torch, options.dtype),
        device="cpu",
        threads=options.threads,
        kv_blocks=options.kv_blocks,
    )
    warm_up()
    table = KvTable(model.kv.blocks, model.kv.block_tokens, MAX_SESSIONS)
    engine = EngineAlone(PagedEngine(model, "bench"), table, sorted(model.info.eos_token_ids))
    print(json.dumps({"ready": model.info.name}), file=answers, flush=True)
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

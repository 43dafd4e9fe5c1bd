"""What each rank of a test runs: `python -m tests.ray.program RANK SIZE MEETING TASK`.

All ranks make the same calls; rank 0 writes what it found to the task's `out`.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from services.core.step import Chunk
from services.engine.model import CausalModel
from services.engine.process_group import Meeting, ProcessGroup, join
from services.engine.ranks import ALONE, Ranks

BLOCKS = 64


def main() -> None:
    rank, size, meeting, task = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    torch.set_num_threads(1)
    group = join(rank, size, device="cpu", meeting=Meeting(file=meeting)) if size > 1 else None
    found = {dtype: work(task, dtype, group or ALONE) for dtype in task["dtypes"]}
    if rank == 0:
        torch.save(found, task["out"])
    if isinstance(group, ProcessGroup):
        group.close()


def work(task: dict[str, Any], dtype: str, ranks: Ranks) -> dict[str, Any]:
    """Logits of the whole prompt, greedy tokens after it, and how often other company gave other bits."""
    model = CausalModel.load(
        Path(task["model"]),
        dtype=getattr(torch, dtype),
        device="cpu",
        threads=1,
        kv_blocks=BLOCKS,
        ranks=ranks,
    )
    prompt = task["prompt"]
    whole = model.run([Chunk(0, prompt, range(4), len(prompt))])
    return {
        "logits": whole,
        "greedy": greedy(model, prompt, task["new_tokens"]),
        "differing": sum(not torch.equal(again, whole) for again in again_in_company(model, prompt, task)),
        "deterministic": model.info.deterministic,
        "forward": model.forward_kind,
        "kv_bytes": model.kv.block_bytes,
    }


def greedy(model: CausalModel, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens, one pass each."""
    tokens = list(prompt)
    fed = 0
    for _ in range(count):
        logits = model.run([Chunk(fed, tokens[fed:], range(8, 16), 1)])
        fed = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


def again_in_company(model: CausalModel, prompt: list[int], task: dict[str, Any]) -> list[torch.Tensor]:
    """The prompt's logits, cut anew each time, each piece in a pass with other sequences."""
    dice = random.Random(task["seed"])
    found = []
    for round_ in range(task["rounds"]):
        blocks = range(16 + 4 * (round_ % 4), 20 + 4 * (round_ % 4))
        parts, start = [], 0
        while start < len(prompt):
            end = min(len(prompt), start + dice.choice(task["cuts"]))
            mine = Chunk(start, prompt[start:end], blocks, end - start)
            before, after = company(dice, prompt, 32), company(dice, prompt, 48)
            logits = model.run([*before, mine, *after])
            skipped = sum(chunk.want_logits for chunk in before)
            parts.append(logits[skipped : skipped + end - start])
            start = end
        found.append(torch.cat(parts))
    return found


def company(dice: random.Random, prompt: list[int], first_block: int) -> list[Chunk]:
    """Up to three other sequences at their beginning."""
    chunks = []
    for index in range(dice.randrange(4)):
        rows = dice.choice((1, 4, 7, 30))
        tokens = dice.choices(prompt, k=rows)
        chunks.append(Chunk(0, tokens, [first_block + index], dice.choice((0, 1))))
    return chunks


if __name__ == "__main__":
    main()

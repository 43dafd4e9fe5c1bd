"""Run the ranks of a test or a proof; the arguments are SIZE MEETING WORK OUT.

Imports once and forks: ranks start together, and cost their own work alone. All of them make the same calls;
rank 0 writes the results to the file OUT.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from galley.common.server.process import die_with_parent
from galley.core.step import StepChunk
from galley.engine.batch import NONE
from galley.engine.model import CausalModel
from galley.engine.parallel.process_group import Store, join
from galley.engine.parallel.ranks import Ranks
from tests.integration.services.target.invariance import InvarianceTrial

SEQUENCES = 6
PROMPT = [3 * i % 97 for i in range(40)]


@dataclass(frozen=True, slots=True)
class Work:
    model: str
    dtype: str = "float32"
    new_tokens: int = 5
    longest: int = 60
    passes: int = 10
    seeds: tuple[int, ...] = (1,)
    quantization: str = NONE


def main() -> None:
    size, meeting = int(sys.argv[1]), sys.argv[2]
    parent = os.getpid()
    rank, followers = _fork(size)
    if rank > 0:
        die_with_parent(parent)
    torch.set_num_threads(1)
    group = join(rank, size, device="cpu", meeting=file_store(Path(meeting), size))
    results = [run(Work(**arguments), group) for arguments in json.loads(sys.argv[3])]
    group.close()
    if rank == 0:
        torch.save(results, sys.argv[4])
        failed = [pid for pid in followers if os.waitpid(pid, 0)[1] != 0]
        raise SystemExit(len(failed))


def file_store(path: Path, size: int) -> Store:
    """Return a store of `size` ranks of one machine; each rank opens its own."""
    torch_stores: Any = torch.distributed  # its types lack FileStore
    return Store("", torch_stores.FileStore(str(path), size))


def _fork(size: int) -> tuple[int, list[int]]:
    followers = []
    for rank in range(1, size):
        pid = os.fork()
        if pid == 0:
            return rank, []
        followers.append(pid)
    return 0, followers


def run(work: Work, ranks: Ranks) -> dict[str, Any]:
    needed = 3 * SEQUENCES * (-(-work.longest // 32) + 1)
    model = CausalModel.load(
        Path(work.model),
        dtype=getattr(torch, work.dtype),
        device="cpu",
        threads=1,
        kv_blocks=needed,
        ranks=ranks,
        quantization=work.quantization,
    )
    trials = [InvarianceTrial(model, SEQUENCES, work.longest, seed).run(work.passes) for seed in work.seeds]
    layers = 1, model.info.layers
    fed = StepChunk(0, PROMPT, range(4), len(PROMPT), feature_layers=layers, feature_rows=len(PROMPT))
    logits, states = model.run_with_states([fed])
    return {
        "logits": logits,
        "states": states,
        "greedy": greedy(model, work.new_tokens),
        "trials": [
            {"seed": seed, **dataclasses.asdict(trial)}
            for seed, trial in zip(work.seeds, trials, strict=True)
        ],
        "rows": sum(trial.rows for trial in trials),
        "differing": sum(trial.differing for trial in trials),
        "deterministic": model.info.deterministic,
        "kv_bytes": model.kv.block_bytes,
    }


def greedy(model: CausalModel, count: int) -> list[int]:
    tokens: list[int] = list(PROMPT)
    fed = 0
    for _ in range(count):
        logits = model.run([StepChunk(fed, tokens[fed:], range(8, 16), 1)])
        fed = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(PROMPT) :]


if __name__ == "__main__":
    main()

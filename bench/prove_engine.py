"""Prove the engine: `make prove-engine`, the long form of test_engine_fuzz.py.

*Fuzz* sends random requests, cuts, rewrites, repeats, cancellations, hints, credit, evictions and failed
steps to scheduler, block table and engine: 10,000 steps on a small random Llama in float32, a tenth in
bfloat16, and some on the real default model. Every confirmed token is compared with a fresh run of its whole
sequence alone. At the end no block may be in use.

*Invariance* feeds sequences to the real model, in bfloat16 and float32, in random batches, chunks, draft
lengths, trees, moves of accepted tokens, evictions and block copies. Every row of logits must equal that of
the sequence alone in one chunk, bit by bit. It is then repeated by --ranks processes that share the model.

Seeds are independent of one another. Writes bench/results/engine_proof.json; exits 1 if anything differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import BENCH, result_path, write_record
from galley.common.models.files import DEFAULT_MODEL
from galley.engine.load.resolve import resolve_model
from galley.engine.model import CausalModel
from tests.fakes.fuzz_world import FuzzSize
from tests.fakes.tiny_model import STOP
from tests.integration.services.ray.program import Work
from tests.integration.services.ray.ranks import run_ranks
from tests.integration.services.target.fuzz import SMALL, PagedWorld, load_pair, save_small_model
from tests.integration.services.target.invariance import InvarianceTrial

STEPS_A_WORLD = 1000
CHECK_EVERY = 20
_TRIAL_PASSES = 60
_SEQUENCES, _LONGEST = 6, 300
_RANKS_TIMEOUT_S = 3600


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof; return 0 if nothing differs and no block is lost."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.prove_engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--passes", type=int, default=10_000, help="fuzzed steps of the small model (default: %(default)s)"
    )
    parser.add_argument("--real-passes", type=int, default=300, help="fuzzed steps of --model")
    parser.add_argument("--trials", type=int, default=6, help="trials of invariance, for each dtype")
    parser.add_argument("--ranks", type=int, default=3, help="ranks that share the model; 1: skip them")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    model_dir = resolve_model(given.model)
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="galley-prove-") as scratch:
        small_dir = save_small_model(Path(scratch))
        found: dict[str, Any] = {
            "fuzz_small_float32": fuzz(small_dir, SMALL, torch.float32, given.passes, given.seed),
            "fuzz_small_bfloat16": fuzz(small_dir, SMALL, torch.bfloat16, given.passes // 10, given.seed),
        }
    found["fuzz_real_bfloat16"] = fuzz(
        model_dir, real_size(model_dir), torch.bfloat16, given.real_passes, given.seed
    )
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        found[f"invariance_{name}"] = invariance(model_dir, dtype, given.trials, given.seed)
        if given.ranks > 1:
            found[f"invariance_{name}_{given.ranks}_ranks"] = invariance_of_ranks(
                model_dir, name, given.ranks, given.trials, given.seed
            )
    record = {
        "options": {name: str(value) for name, value in vars(given).items() if name != "results"},
        "seconds": round(time.monotonic() - began_s, 1),
        **found,
    }
    path = result_path("engine_proof", given.results)
    write_record(path, record)
    print(f"record: {path}")
    held = all(part["held"] for part in found.values())
    print("held" if held else "FAILED")
    return 0 if held else 1


def real_size(model_dir: Path) -> FuzzSize:
    """Return settings with a small pool and short contexts, so that sessions lose blocks."""
    import json  # noqa: PLC0415  # one use

    vocab = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return FuzzSize(vocab, context=192, blocks=14, sessions=6, prompt_tokens=70, max_rows=64, stop=STOP)


def fuzz(model_dir: Path, size: FuzzSize, dtype: torch.dtype, passes: int, seed: int) -> dict[str, Any]:
    """Run worlds of consecutive seeds until there were `passes` steps, or one failed; return the counts."""
    pair = load_pair(model_dir, size, dtype)
    total: dict[str, Any] = {"held": True, "worlds": [], "passes": 0, "tokens_checked": 0, "failure": None}
    while total["passes"] < passes and total["held"]:
        world = PagedWorld(*pair, size, seed)
        try:
            for step in range(STEPS_A_WORLD):
                world.step()
                if step % CHECK_EVERY == 0:
                    world.check()
                if total["passes"] + world.counts.passes >= passes:
                    break
            world.finish()
        except Exception as error:  # noqa: BLE001  # whatever it is, the proof has failed and says of what
            total["held"], total["failure"] = False, f"seed {seed}: {error!r}"
        total["worlds"].append({"seed": seed, **world.counts.as_record()})
        total["passes"] += world.counts.passes
        total["tokens_checked"] += world.counts.tokens_checked
        print(f"fuzz {model_dir.name} {dtype}: seed {seed}, {total['passes']} passes, held: {total['held']}")
        seed += 1
    return total


def invariance(model_dir: Path, dtype: torch.dtype, trials: int, seed: int) -> dict[str, Any]:
    """Run trials of consecutive seeds; return counts, `held` if no logits or states differ."""
    blocks = 3 * _SEQUENCES * (-(-_LONGEST // 32) + 1)
    model = CausalModel.load(model_dir, dtype=dtype, device="cpu", threads=1, kv_blocks=blocks)
    counts = []
    for trial in range(trials):
        found = InvarianceTrial(model, _SEQUENCES, _LONGEST, seed + trial).run(_TRIAL_PASSES)
        counts.append({"seed": seed + trial, **dataclasses.asdict(found)})
        print(f"invariance {dtype}: seed {seed + trial}, {found.rows} rows, {found.differing} differ")
    return {
        "held": all(count["differing"] == 0 for count in counts),
        "rows": sum(count["rows"] for count in counts),
        "trials": counts,
    }


def invariance_of_ranks(model_dir: Path, dtype: str, ranks: int, trials: int, seed: int) -> dict[str, Any]:
    """Run `invariance` with `ranks` processes that share the model over gloo."""
    seeds = tuple(range(seed, seed + trials))
    work = Work(str(model_dir), dtype, longest=_LONGEST, passes=_TRIAL_PASSES, seeds=seeds)
    with tempfile.TemporaryDirectory(prefix="galley-prove-") as scratch:
        (found,) = run_ranks(ranks, [work], Path(scratch) / "ranks", timeout_s=_RANKS_TIMEOUT_S)
    print(f"invariance {dtype}, {ranks} ranks: {found['rows']} rows, {found['differing']} differ")
    held = found["differing"] == 0 and found["deterministic"]
    return {"held": held, "rows": found["rows"], "trials": found["trials"]}


if __name__ == "__main__":
    sys.exit(main())

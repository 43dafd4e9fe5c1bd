"""The measurements of `make bench-engine` at one number of threads, in a process of their own.

bench/engine/__main__.py starts it. It writes what it measured as JSON and, as the part `profile`, a profile.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.engine import parts as engine_parts
from bench.engine.host import host_time
from bench.engine.sides import Case, OurStep, TransformersModel
from bench.paired import alternate, fastest
from galley.bench.workloads import fixed_workload
from galley.common.models.tokenizer import Tokenizer
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.engine.model import CausalModel

SPLITS = (
    (1, 1),
    (1, 5),
    (1, 8),
    (8, 1),
    (1, 16),
    (16, 1),
    (8, 5),
    (40, 1),
    (16, 5),
    (80, 1),
    (64, 5),
    (1, 320),
)
PARTS = (
    *("steps", "small", "invariance", "sampling", "host", "contexts", "pools", "prefill", "bandwidth"),
    "profile",
)
PROFILED = Case(16, 5, 256)
_PROFILED_STEPS = 5


@dataclass(frozen=True, slots=True)
class Task:
    """The measurements of this process."""

    model_dir: Path
    threads: int
    contexts: tuple[int, ...]
    splits: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    pairs: int
    dtype: str
    profile: Path


def measure(task: Task) -> dict[str, Any]:
    """Measure all parts of the task; return the results by name."""
    dtype = getattr(torch, task.dtype)
    cases = [Case(*split, context) for context in task.contexts for split in task.splits]
    peer = TransformersModel(task.model_dir, dtype)
    model = _load(task, max(_blocks_needed(cases), 16 * 64))
    found: dict[str, Any] = {
        "weights_bytes": sum(weight.nbytes for weight in peer.model.parameters()),
        "kv_block_bytes": model.kv.block_bytes,
        "kv_blocks": model.kv.blocks,
    }
    parts: dict[str, Callable[[], Any]] = {
        "bandwidth": engine_parts.bandwidth,
        "steps": lambda: [_step(model, peer, case, task.pairs) for case in cases],
        "small": lambda: engine_parts.small(model, task.pairs),
        "prefill": lambda: engine_parts.prefill(model, peer, task.pairs),
        "invariance": lambda: engine_parts.invariance(model, peer.config, task.pairs),
        "sampling": lambda: engine_parts.sampling(model, _text(task.model_dir), task.pairs),
        "contexts": lambda: engine_parts.contexts(model, task.pairs),
        "pools": lambda: _pools(task),
        "host": lambda: host_time(peer.config.num_hidden_layers, task.pairs),
    }
    found |= {name: part() for name, part in parts.items() if name in task.parts}
    if "profile" in task.parts:
        task.profile.write_text(_profile(OurStep(model, PROFILED)), encoding="utf-8")
    return found


def _load(task: Task, kv_blocks: int) -> CausalModel:
    return CausalModel.load(
        task.model_dir,
        dtype=getattr(torch, task.dtype),
        device="cpu",
        threads=task.threads,
        kv_blocks=kv_blocks,
    )


def _blocks_needed(cases: Sequence[Case]) -> int:
    return max(case.blocks(BLOCK_TOKENS) for case in cases)


def _step(model: CausalModel, peer: TransformersModel, case: Case, pairs: int) -> dict[str, Any]:
    forms = peer.forms(case)
    form = fastest(forms)
    theirs = forms.pop(form)
    forms.clear()  # its memory is wanted
    times = alternate({"ours": OurStep(model, case), "peer": theirs}, pairs)
    print(f"{case}: " + ", ".join(f"{name} {min(t.wall_s) * 1e3:.1f} ms" for name, t in times.items()))
    return {
        "sessions": case.sessions,
        "tokens": case.tokens,
        "context": case.context,
        "rows": case.rows,
        "peer_form": form,
        **{name: list(timed.wall_s) for name, timed in times.items()},
        **{f"{name}_cpu": list(timed.cpu_s) for name, timed in times.items()},
    }


def _text(model_dir: Path) -> list[list[int]]:
    """Return the first prompts of a set, one for each session of SAMPLED, as token ids."""
    tokenizer = Tokenizer.load(str(model_dir))
    encoded = [
        tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
        for prompt in fixed_workload("rewrite").prompts
    ]
    return encoded[: engine_parts.SAMPLED.sessions]


def _pools(task: Task) -> dict[str, Any]:
    needed = engine_parts.POOL_CASE.blocks(BLOCK_TOKENS)
    small, large = _load(task, needed), _load(task, needed * engine_parts.POOL_FACTOR)
    return engine_parts.pools(small, large, task.pairs)


def _profile(step: OurStep) -> str:
    """Return torch's profile of a few steps and Python's, which counts our kernels as their callers."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        _steps(step)
    python = cProfile.Profile()
    python.runcall(_steps, step)
    text = io.StringIO()
    pstats.Stats(python, stream=text).strip_dirs().sort_stats("tottime").print_stats(25)
    operators = seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=25)
    return f"{_PROFILED_STEPS} steps of {PROFILED}\n\n{operators}\n\n{text.getvalue()}"


def _steps(step: OurStep) -> None:
    for _ in range(_PROFILED_STEPS):
        step()


def main() -> int:
    """Read the task from the command line, and write the result to `out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", help="the task as JSON")
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    task = json.loads(given.task)
    measured = measure(
        Task(
            model_dir=Path(task["model_dir"]),
            threads=task["threads"],
            contexts=tuple(task["contexts"]),
            splits=tuple((sessions, tokens) for sessions, tokens in task["splits"]),
            parts=tuple(task["parts"]),
            pairs=task["pairs"],
            dtype=task["dtype"],
            profile=Path(task["profile"]),
        )
    )
    measured["omp_num_threads"] = os.environ.get("OMP_NUM_THREADS")
    given.out.write_text(json.dumps(measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

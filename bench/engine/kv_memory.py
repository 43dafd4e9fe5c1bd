"""Measure whether the KV pool takes more memory than `blocks` x block bytes.

One process computes KV into the first blocks of its pool, which also allocates all work space for steps of
that shape, and then into the others. The growth of its resident memory in the second part is what the other
blocks take.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from bench.harness import BENCH, Goal
from galley.common.server.process import hand_back_free_memory
from galley.core.step import StepChunk
from galley.engine.model import CausalModel

FIRST_BLOCKS, ALL_BLOCKS = 64, 320
TOLERANCE = 0.05
_SESSION_BLOCKS = 16


def measure(model_dir: Path, dtype: str) -> dict[str, Any]:
    """Return the bytes by which a fresh process grew between the readings, and the bytes expected."""
    command = (sys.executable, "-m", "bench.engine.kv_memory", str(model_dir), dtype)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=BENCH.parent)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def goal(found: dict[str, Any]) -> Goal:
    """Return a goal, met if what the blocks take is within TOLERANCE of blocks x block bytes."""
    ratio = found["grown_bytes"] / found["expected_bytes"]
    what = (
        f"resident memory of {found['blocks']} blocks over blocks x block bytes "
        f"({found['grown_bytes'] / 2**20:.1f} of {found['expected_bytes'] / 2**20:.1f} MiB)"
    )
    return Goal("kv-memory", what, f"{ratio:.3f}", f"1 +- {TOLERANCE:g}", abs(ratio - 1) <= TOLERANCE)


def _grow(model_dir: Path, dtype: str) -> dict[str, int]:
    kind = getattr(torch, dtype)
    model = CausalModel.load(model_dir, dtype=kind, device="cpu", threads=1, kv_blocks=ALL_BLOCKS)
    _fill(model, 0, FIRST_BLOCKS)
    before = _resident()
    _fill(model, FIRST_BLOCKS, ALL_BLOCKS)
    blocks = ALL_BLOCKS - FIRST_BLOCKS
    return {
        "blocks": blocks,
        "block_bytes": model.kv.block_bytes,
        "grown_bytes": _resident() - before,
        "expected_bytes": blocks * model.kv.block_bytes,
    }


def _fill(model: CausalModel, first: int, last: int) -> None:
    """Compute KV into the blocks [first, last), a session of _SESSION_BLOCKS after another."""
    tokens = [7] * (_SESSION_BLOCKS * model.kv.block_tokens)
    for block in range(first, last, _SESSION_BLOCKS):
        model.run([StepChunk(0, tokens, list(range(block, block + _SESSION_BLOCKS)), 0)])


def _resident() -> int:
    hand_back_free_memory()
    return int(psutil.Process().memory_info().rss)


def main() -> int:
    """Fill a pool; print what it takes as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("dtype")
    given = parser.parse_args()
    print(json.dumps(_grow(given.model, given.dtype)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

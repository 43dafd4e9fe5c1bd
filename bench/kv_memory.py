"""How much memory the KV pool really takes: `blocks` x block bytes, or more?

Two processes load the same model over pools of different sizes and compute KV into every block of them. What
one is larger by than the other (its resident memory, as the kernel counts it) is what the blocks take; code,
weights and work space are the same in both.
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
from services.core.step import Chunk
from services.engine.model import CausalModel

SMALL_BLOCKS, LARGE_BLOCKS = 64, 320
TOLERANCE = 0.05
_SESSION_BLOCKS = 16


def measure(model_dir: Path, dtype: str) -> dict[str, Any]:
    """Resident bytes with the small and the large pool full, and what the difference should be."""
    small, large = (_in_process(model_dir, dtype, blocks) for blocks in (SMALL_BLOCKS, LARGE_BLOCKS))
    return {
        "small_blocks": SMALL_BLOCKS,
        "large_blocks": LARGE_BLOCKS,
        "block_bytes": small["block_bytes"],
        "grown_bytes": large["rss"] - small["rss"],
        "expected_bytes": (LARGE_BLOCKS - SMALL_BLOCKS) * small["block_bytes"],
    }


def goal(found: dict[str, Any]) -> Goal:
    """Met if what the blocks take is within TOLERANCE of blocks x block bytes."""
    ratio = found["grown_bytes"] / found["expected_bytes"]
    what = (
        f"resident memory of {LARGE_BLOCKS - SMALL_BLOCKS} blocks over blocks x block bytes "
        f"({found['grown_bytes'] / 2**20:.1f} of {found['expected_bytes'] / 2**20:.1f} MiB)"
    )
    return Goal("kv-memory", what, f"{ratio:.3f}", f"1 +- {TOLERANCE:g}", abs(ratio - 1) <= TOLERANCE)


def _in_process(model_dir: Path, dtype: str, blocks: int) -> Any:
    command = (sys.executable, "-m", "bench.kv_memory", str(model_dir), dtype, str(blocks))
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=BENCH.parent)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _fill(model_dir: Path, dtype: str, blocks: int) -> dict[str, int]:
    kind = getattr(torch, dtype)
    model = CausalModel.load(model_dir, dtype=kind, device="cpu", threads=1, kv_blocks=blocks)
    tokens = [7] * (_SESSION_BLOCKS * model.kv.block_tokens)
    # The last session is a whole one too, so that both processes do passes of the same shapes.
    for first in range(0, blocks, _SESSION_BLOCKS):
        model.run([Chunk(0, tokens, list(range(first, first + _SESSION_BLOCKS)), 0)])
    return {"rss": psutil.Process().memory_info().rss, "block_bytes": model.kv.block_bytes}


def main() -> int:
    """Fill one pool; say what it takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("dtype")
    parser.add_argument("blocks", type=int)
    given = parser.parse_args()
    print(json.dumps(_fill(given.model, given.dtype, given.blocks)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs the ranks of a test as processes of their own, which end with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

TIMEOUT_S = 120


def run_ranks(size: int, task: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What rank 0 of `size` found; raises AssertionError, with its output, if a rank failed."""
    folder.mkdir()
    out = folder / "found.pt"
    command = [sys.executable, "-m", "tests.ray.program"]
    told = json.dumps({**task, "out": str(out)})
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder / "meeting"), told],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, output
    found: dict[str, Any] = torch.load(out, weights_only=True)
    return found

"""Runs ranks as processes of their own, which end with this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.integration.services.ray.program import Work


def run_ranks(size: int, works: Sequence[Work], folder: Path, timeout_s: float = 120) -> list[dict[str, Any]]:
    folder.mkdir()
    out = folder / "found.pt"
    arguments = json.dumps([asdict(work) for work in works])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.integration.services.ray.program",
            str(size),
            str(folder / "meeting"),
            arguments,
            str(out),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    results: list[dict[str, Any]] = torch.load(out, weights_only=True)
    return results

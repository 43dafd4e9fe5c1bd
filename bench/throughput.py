"""`make bench-throughput`: closed loops of 1, 8, 16 and 64 streams through the real gateway.

Arms: `plain` (speculation off) and `ngram-4` through client, gateway, draft, target and Valkey, all real
processes; and `engine`, the target's scheduler and engine alone in one process, no gateway, no gRPC, no
Redis. All processes of a side together get the same cores (--cores); the client shares them with our
stack. bench/closed_loop.py says what a block is. A pair is every number of streams at every temperature,
by every arm in turn; seven pairs take about ten minutes on two cores. `--quick` runs one short pair (half
a minute), whose figures mean nothing and whose goals are not judged.

The KV pool's memory is measured apart (bench/kv_memory.py). A profile of the target under load (py-spy)
goes beside the JSON where py-spy may look into processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench import kv_memory
from bench.closed_loop import LoopPlan, run_loads
from bench.harness import BENCH, Goal, commit, result_path
from bench.loop_run import LoopOptions, Result, add_options, finish_options, keep_to_cores, our_stack, report
from bench.loop_sides import process_loop
from galley.bench.closed_loop import LoopBlock, LoopSide
from galley.common.server.process import thread_environment
from galley.engine.load.resolve import resolve_model
from services.gateway.request.tokenize import Tokenizer

PLAIN, ENGINE = "plain", "engine"
ARMS = (PLAIN, "ngram-4", ENGINE)
_FILE_WIDTH = 150
_PROFILE_S = 8


def encoder(model_dir: Path) -> Callable[[str], list[int]]:
    """A user turn as the token ids that the gateway makes of it."""
    tokenizer = Tokenizer.load(str(model_dir))
    return lambda text: tokenizer.encode_chat([{"role": "user", "content": text}])


def engine_command(options: LoopOptions, model_dir: Path) -> tuple[list[str], dict[str, str]]:
    """How the engine alone is started: command and environment."""
    flags = ["--threads", str(options.engine_threads), "--dtype", options.dtype]
    command = [sys.executable, "-m", "bench.peer_engine", str(model_dir), *flags]
    paths = os.pathsep.join(filter(None, (str(BENCH.parent), os.environ.get("PYTHONPATH"))))
    return command, {**os.environ, **thread_environment(options.engine_threads), "PYTHONPATH": paths}


async def measure(
    options: LoopOptions, model_dir: Path, console: Console, profile: Path | None
) -> tuple[list[LoopBlock], dict[str, Any]]:
    """All blocks, and facts of our target: its memory when it was ready, and at the end."""
    plan = LoopPlan(
        options.arms, options.streams, options.temperatures, options.pairs, options.max_tokens, options.seed
    )
    async with AsyncExitStack() as held:
        sides: dict[str, LoopSide] = {}
        console.print("starting the stack")
        ours = [arm for arm in options.arms if arm != ENGINE]
        stack, gateways = await held.enter_async_context(our_stack(options, model_dir, ours))
        sides |= gateways
        target = psutil.Process(stack.pid("target"))
        rss_ready = target.memory_info().rss
        if ENGINE in options.arms:
            log = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="galley-bench-"))) / "engine.log"
            command, env = engine_command(options, model_dir)
            sides[ENGINE] = await held.enter_async_context(
                process_loop(command, env, log, encoder(model_dir))
            )
        spy = _Spy(target.pid, profile)
        held.callback(spy.wait)
        blocks = await run_loads(plan, sides, lambda said: console.print(said, style="dim"), spy.after_block)
        facts = {"target_rss_ready": rss_ready, "target_rss_after": target.memory_info().rss}
        return blocks, facts


class _Spy:
    """Has py-spy look at a process for a while, once, after the first block, where py-spy is there."""

    def __init__(self, pid: int, out: Path | None) -> None:
        self._pid = pid
        self._out = out
        self._process: subprocess.Popen[bytes] | None = None

    def after_block(self, _: LoopBlock) -> None:
        if self._out is None or self._process is not None:
            return
        py_spy = Path(sys.executable).with_name("py-spy")
        if py_spy.exists():
            self._out.parent.mkdir(parents=True, exist_ok=True)
            flags = [
                "-f",
                "raw",
                "-r",
                "50",
                "-d",
                str(_PROFILE_S),
                "-p",
                str(self._pid),
                "-o",
                str(self._out),
            ]
            self._process = subprocess.Popen(
                [str(py_spy), "record", "--nonblocking", *flags],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def wait(self) -> None:
        """Until it has written what it saw."""
        if self._process is not None:
            self._process.wait(timeout=4 * _PROFILE_S)


def parse_options(argv: Sequence[str]) -> tuple[LoopOptions, Path | None]:
    """Read the command line; exits 2 with a message if a value is wrong. The path is None for no record."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, LoopOptions(ARMS))
    return finish_options(parser, vars(parser.parse_args(argv)), PLAIN)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 however the goals stand, for a missed goal is a finding and no error."""
    options, root = parse_options(sys.argv[1:] if argv is None else argv)
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    record = None if root is None else result_path("throughput", commit(), root)
    cores = keep_to_cores(options.cores)
    model_dir = resolve_model(options.model)
    profile = None if record is None else record.with_suffix(".target-profile.txt")
    blocks, facts = asyncio.run(measure(options, model_dir, console, profile))
    facts["cores"] = cores
    goals: list[Goal] = []
    if not options.quick:
        facts["kv_memory"] = kv_memory.measure(model_dir, options.dtype)
        goals.append(kv_memory.goal(facts["kv_memory"]))
    report(Result("throughput", PLAIN, blocks, goals, facts), options, console, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-peers`: our stack and our engine alone beside vLLM on the CPU, 1 to 64 streams.

Same weights (the default model's safetensors, bfloat16), same prompts, same number of tokens, speculation
off; all processes of each side together get the same cores. Blocks alternate within one run. Every arm
answers every load: `gateway` is client, gateway, draft, target and Valkey; `engine` our scheduler and
engine in one process; `vllm` vLLM's engine, stepped in its process without a server, which is more than
fair to it against `gateway` and like against like for `engine`. `vllm-ngram` may be asked for (its prompt
lookup of 4 tokens), and `ngram-4` of ours.

vLLM gets token ids and detokenizes; our gateway gets text, tokenizes, detokenizes, logs to Valkey and
streams. Differences that remain: sampling at temperature 0.7 is by other noise, so that answers differ;
greedy answers differ after near ties, for bf16 rounds differently in each. llama.cpp and OpenVINO have no
bf16 form of this model that they serve well (4-bit ones, no equals): they are not measured here.

The first run makes vLLM's environment under bench/.peers (some GB). Seven pairs take about twelve minutes
on two cores; `--quick` runs one short pair, whose figures mean nothing and whose goals are not judged.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.closed_loop import LoopPlan, run_loads
from bench.harness import BENCH, Goal, at_least, commit, result_path
from bench.loop_run import LoopOptions, Result, add_options, finish_options, keep_to_cores, our_stack, report
from bench.loop_sides import process_loop
from bench.loop_summary import of_arm, speed_ratio
from bench.peers_env import vllm_environment, vllm_python
from bench.throughput import encoder, engine_command
from galley.bench.closed_loop import LoopBlock, LoopSide
from galley.engine.load.resolve import resolve_model

GATEWAY, ENGINE, VLLM, VLLM_NGRAM = "gateway", "engine", "vllm", "vllm-ngram"
ARMS = (GATEWAY, ENGINE, VLLM)
BOUNDS = {GATEWAY: 0.8, ENGINE: 1.0}
_NGRAM_TOKENS = 4
_FILE_WIDTH = 150


async def measure(
    options: LoopOptions, model_dir: Path, cores: list[int], console: Console
) -> tuple[list[LoopBlock], dict[str, Any]]:
    """All blocks, and which versions of the peers gave theirs."""
    plan = LoopPlan(
        options.arms, options.streams, options.temperatures, options.pairs, options.max_tokens, options.seed
    )
    facts: dict[str, Any] = {"cores": cores}
    async with AsyncExitStack() as held:
        logs = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="galley-bench-")))
        sides: dict[str, LoopSide] = {}
        for arm in options.arms:
            process = _process_of(arm, options, model_dir, cores)
            if process is not None:
                console.print(f"starting {arm}")
                command, env = process
                log = logs / f"{arm}.log"
                side = await held.enter_async_context(process_loop(command, env, log, encoder(model_dir)))
                sides[arm], facts[arm] = side, side.told
        console.print("starting the stack")
        ours = {arm: "plain" if arm == GATEWAY else arm for arm in options.arms if arm not in sides}
        _, gateways = await held.enter_async_context(our_stack(options, model_dir, list(ours.values())))
        sides |= {arm: gateways[speculation] for arm, speculation in ours.items()}
        blocks = await run_loads(plan, sides, lambda said: console.print(said, style="dim"))
    return blocks, facts


def _process_of(
    arm: str, options: LoopOptions, model_dir: Path, cores: list[int]
) -> tuple[Sequence[str], Mapping[str, str]] | None:
    """Command and environment of an arm that is one process; None of those behind our gateway."""
    if arm == ENGINE:
        return engine_command(options, model_dir)
    if arm not in {VLLM, VLLM_NGRAM}:
        return None
    command = [str(vllm_python()), str(BENCH / "peer_vllm.py"), str(model_dir)]
    command += ["--max-streams", str(max(options.streams))]
    if arm == VLLM_NGRAM:
        command += ["--ngram", str(_NGRAM_TOKENS)]
    return command, vllm_environment(cores)


def goals(options: LoopOptions, blocks: Sequence[LoopBlock]) -> list[Goal]:
    """Ours against vLLM at each number of streams and temperature, speculation off on both sides."""
    found = []
    for arm, bound in BOUNDS.items():
        for streams in options.streams:
            for temperature in options.temperatures:
                mine = of_arm(blocks, arm, streams, temperature)
                theirs = of_arm(blocks, VLLM, streams, temperature)
                if mine and theirs:
                    what = f"tokens/s of {arm} against vLLM, {streams} streams at {temperature:g}, plain"
                    found.append(at_least(f"{arm}-vllm", what, speed_ratio(mine, theirs), bound, "x"))
    return found


def parse_options(argv: Sequence[str]) -> tuple[LoopOptions, Path | None]:
    """Read the command line; exits 2 with a message if a value is wrong. The path is None for no record."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, LoopOptions(ARMS))
    return finish_options(parser, vars(parser.parse_args(argv)), VLLM)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 however the goals stand, for a missed goal is a finding and no error."""
    options, root = parse_options(sys.argv[1:] if argv is None else argv)
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    record = None if root is None else result_path("peers", commit(), root)
    cores = keep_to_cores(options.cores)
    blocks, facts = asyncio.run(measure(options, resolve_model(options.model), cores, console))
    reached = [] if options.quick else goals(options, blocks)
    report(Result("peers", VLLM, blocks, reached, facts), options, console, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

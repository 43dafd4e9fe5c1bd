"""What `make bench-throughput` and `make bench-peers` share: cores, our stack, the record."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import loop_tables
from bench.arms import Cpu, strategies_of
from bench.closed_loop import block_record
from bench.harness import BENCH, MIN_PAIRS, Goal, commit, machine, write_record
from bench.loop_summary import loop_rows
from bench.options import integers, names, numbers
from galley.bench.closed_loop import LoopBlock
from galley.bench.gateway import GatewayLoop
from galley.bench.workloads import PROMPT_SETS, prompt_hash
from galley.client.client import AsyncClient
from galley.common.config.defaults import DEFAULT_MODEL
from galley.stack.stack import Stack, StackOptions

SERVERS = ("valkey", "target", "draft", "gateway")
STREAMS = (1, 8, 16, 64)
TEMPERATURES = (0.0, 0.7)
_QUICK_STREAMS = 8


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """What a closed loop runs. All processes of each side together may use `cores` cores."""

    arms: tuple[str, ...]
    streams: tuple[int, ...] = STREAMS
    temperatures: tuple[float, ...] = TEMPERATURES
    pairs: int = MIN_PAIRS
    max_tokens: int = 32
    cores: int = 2
    target_threads: int = 2
    engine_threads: int = 2
    dtype: str = "bfloat16"
    model: str = DEFAULT_MODEL
    seed: int = 20261121
    quick: bool = False


def add_options(parser: argparse.ArgumentParser, default: LoopOptions) -> None:
    """The flags that both benchmarks have."""
    parser.add_argument("--arms", type=names, default=default.arms, help="comma separated")
    parser.add_argument("--streams", type=integers, default=default.streams)
    parser.add_argument("--temperatures", type=numbers, default=default.temperatures)
    parser.add_argument("--pairs", type=int, default=default.pairs, help=f"at least {MIN_PAIRS}")
    parser.add_argument("--max-tokens", type=int, default=default.max_tokens)
    parser.add_argument("--cores", type=int, default=default.cores, help="of this machine, for each side")
    parser.add_argument("--target-threads", type=int, default=default.target_threads, help="in our stack")
    parser.add_argument("--engine-threads", type=int, default=default.engine_threads, help="engine alone")
    parser.add_argument("--dtype", default=default.dtype)
    parser.add_argument("--model", default=default.model, help="default: the stack's own")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--quick", action="store_true", help="one short pair, no record, no goals")
    parser.add_argument("--results", type=Path, default=BENCH / "results")


def finish_options(
    parser: argparse.ArgumentParser, given: dict[str, Any], baseline: str
) -> tuple[LoopOptions, Path | None]:
    """What was given; exits 2 with a message if something is wrong. The path is None for no record."""
    root: Path | None = given.pop("results")
    options = LoopOptions(**given)
    if baseline not in options.arms:
        parser.error(f"--arms: everything is compared with {baseline}")
    if options.quick:
        few = tuple(streams for streams in options.streams if streams <= _QUICK_STREAMS)
        options = dataclasses.replace(
            options, pairs=1, max_tokens=min(12, options.max_tokens), streams=few or options.streams[:1]
        )
        root = None
    elif options.pairs < MIN_PAIRS:
        parser.error(f"--pairs: at least {MIN_PAIRS}")
    return options, root


def keep_to_cores(count: int) -> list[int]:
    """Keep this process, and all that it starts, to the first `count` of the cores that it may use."""
    cores = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, cores)
    return cores


@asynccontextmanager
async def our_stack(
    options: LoopOptions, model_dir: Path, speculations: Sequence[str]
) -> AsyncIterator[tuple[Stack, dict[str, GatewayLoop]]]:
    """Our whole stack, and a side for each way to speculate ("plain", "ngram-4")."""
    stack_options = StackOptions(
        model=str(model_dir),
        strategies=strategies_of(tuple(speculations)) or ("ngram",),
        dtype=options.dtype,
        threads=options.target_threads,
    )
    async with Stack(stack_options) as stack, AsyncClient(stack.gateways[0]) as client:
        cpu = Cpu([stack.pid(part) for part in stack.parts if part in SERVERS])
        yield stack, {name: GatewayLoop(client, cpu.seconds, name) for name in speculations}


@dataclass(frozen=True, slots=True)
class Result:
    """What a run came to; arms are compared with `baseline`."""

    name: str
    baseline: str
    blocks: Sequence[LoopBlock]
    goals: Sequence[Goal]
    facts: dict[str, Any]


def report(result: Result, options: LoopOptions, console: Console, record: Path | None) -> None:
    """Print the table and the goals; with `record`, leave JSON and plot there."""
    rows = loop_rows(result.blocks, result.baseline)
    console.print(loop_tables.table(rows, result.baseline))
    for key, value in result.facts.items():
        console.print(f"{key}: {value}", markup=False, highlight=False, soft_wrap=True)
    if record is not None:
        found = {
            "name": result.name,
            "commit": commit(),
            "options": dataclasses.asdict(options),
            "machine": machine(),
            "prompt_sha256": {prompt_set: prompt_hash(prompt_set) for prompt_set in PROMPT_SETS},
            "facts": result.facts,
            "rows": [dataclasses.asdict(row) for row in rows],
            "goals": [dataclasses.asdict(goal) for goal in result.goals],
            "blocks": [block_record(block) for block in result.blocks],
        }
        write_record(record, found)
        loop_tables.draw(record.with_suffix(".png"), rows, result.baseline)
        console.print(f"record: {record}")
    console.print("goal | what | measured | bound | met", markup=False, highlight=False, soft_wrap=True)
    for goal in result.goals:
        console.print(str(goal), markup=False, highlight=False, soft_wrap=True)

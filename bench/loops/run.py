"""Run a loop benchmark: its blocks, on the sides that its scenario starts.

A scenario names its arms, starts their processes, and states its goals. Everything else is the same for all:
blocks alternate between the arms of a pair, the first arm rotates, and no two pairs share a prompt
(`galley.bench.tuning` says how).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.harness import Goal
from bench.loops.options import Options, workloads_of
from bench.quiet import Watch
from galley.bench.closed_loop import WARM_UP, Load, LoopBlock, LoopSide, run_all
from galley.bench.tuning import Cell, Sizes, pair_loads, priming
from galley.bench.workloads import Workload

_WARM_UP_TOKENS = 12


@dataclass(slots=True)
class Run:
    """The measurements of a run so far; scenarios add facts of their own."""

    options: Options
    model_dir: Path
    folder: Path
    report: Callable[[str], None]
    life: int = 0
    blocks: list[LoopBlock] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


Start = Callable[[Run], AbstractAsyncContextManager[Mapping[str, LoopSide]]]


def own_tag(arm: str) -> str:
    """Return the tag of an arm whose texts no other arm answers."""
    return f".{arm}"


@dataclass(frozen=True, slots=True)
class Scenario:
    """One loop benchmark.

    `start` yields a side for each arm, for one life. Arms of a pair with the same `tag_of` answer the same
    texts; a tag makes texts differ, so that no arm finds those of another tag in its prefix cache.
    `primed_by` names the arm whose block, which does not count, puts untagged texts into the cache before.
    `only_first_turns` leaves the later turns of prompts out, for arms that are no gateway.
    `check` returns the error of an option, or "".
    """

    name: str
    about: str
    defaults: Options
    baseline: str
    start: Start
    goals: Callable[[Run], list[Goal]]
    tag_of: Callable[[str], str] = lambda _: ""
    primed_by: str = ""
    only_first_turns: bool = False
    workloads: Callable[[Options], list[Workload]] = workloads_of
    required: frozenset[str] = frozenset()
    check: Callable[[Options], str] = lambda _: ""


def loads(scenario: Scenario, options: Options, life: int) -> Iterator[Load]:
    """Yield the blocks of one life: a short warm-up of every arm, then the pairs."""
    sizes = Sizes(
        options.prompts_per_block, options.max_tokens, options.seed, nonce=f"{life}", turns=options.turns
    )
    short = replace(sizes, max_tokens=min(_WARM_UP_TOKENS, options.max_tokens), turns=1)
    cells = [
        Cell(
            workload.first_turns() if scenario.only_first_turns else workload,
            streams,
            temperature,
            options.arms,
            index,
        )
        for streams in options.streams
        for index, workload in enumerate(scenario.workloads(options))
        for temperature in options.temperatures
        if workload.suits(streams)
    ]
    widest = max(cells, key=lambda cell: cell.streams)
    for arm in options.arms:
        yield from pair_loads(replace(widest.cut(short.max_tokens), arms=(arm,)), WARM_UP, short)
    for pair in range(life * options.pairs, (life + 1) * options.pairs):
        for number, cell in enumerate(cells):
            # The tag of its prompts names the cell too: none finds the prompts of another cached.
            own = replace(sizes, nonce=f"{life}.{number:02}")
            if scenario.primed_by:
                yield replace(priming(cell, pair, own), arm=scenario.primed_by)
            yield from pair_loads(cell, pair, own, scenario.tag_of)


async def measure(
    scenario: Scenario, options: Options, model_dir: Path, report: Callable[[str], None]
) -> Run:
    """Start the sides of each life and run its blocks; the warm-ups are not kept."""
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="galley-bench-") as folder:
        run = Run(options, model_dir, Path(folder), report)
        watch = Watch()
        for run.life in range(options.lives):
            report(f"life {run.life + 1} of {options.lives}: starting {', '.join(options.arms)}")
            async with scenario.start(run) as sides:
                watch.begin()
                every = list(loads(scenario, options, run.life))
                run.blocks += await run_all(
                    every, sides, report, lambda block: watch.note(cell_of(block.load))
                )
    run.facts["others_share"] = watch.report()
    run.facts["took_s"] = round(time.perf_counter() - began_s)
    return run


def cell_of(load: Load) -> str:
    """Return the name of a load's cell, for reports."""
    return f"{load.workload}, {load.streams} streams at {load.temperature:g}"


def keep_to_cores(count: int) -> list[int]:
    """Keep this process, and all that it starts, to the first `count` of its cores; return these."""
    cores = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, cores)
    return cores


def of_arm(
    blocks: Sequence[LoopBlock], arm: str, streams: int | None = None, temperature: float | None = None
) -> list[LoopBlock]:
    """Return an arm's blocks, pair by pair; None stands for any number of streams, any temperature."""
    mine = [
        block
        for block in blocks
        if block.load.arm == arm
        and streams in {None, block.load.streams}
        and temperature in {None, block.load.temperature}
    ]
    return sorted(mine, key=lambda block: block.load.pair)

"""Measure what speculation gains and costs: off, auto (the gateway chooses) and a fixed choice, by workload.

It runs the default pair of models; gateway, draft, target and Valkey are processes of their own. Each arm has
workload labels of its own in each pair: the draft learns from recent answers of a label, and no arm may copy
what another answered. Prompts are cached for all arms alike, so that blocks measure decoding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

from bench.harness import Goal, at_least, at_most
from bench.loops.options import MIXED, Options
from bench.loops.run import Run, Scenario, of_arm
from bench.loops.sides import stack_loop
from galley.bench.closed_loop import AUTO, OFF, LoopBlock, LoopSide
from galley.bench.summary import Interval, mean_ratio, median_interval, pass_times, speculated, speed_ratio
from galley.bench.workloads import PROMPT_SETS, TASKS
from galley.client.client import AsyncClient
from galley.stack.stack import Stack, StackOptions

ALONE_BOUND, REWRITE_BOUND, AT_EIGHT_BOUND = 1.6, 3.0, 1.15
NEVER_A_LOSS_BOUND, BEST_FIXED_BOUND = 0.98, 0.95
# The interval of a cell that is no loss reaches down to 0.95 at most.
NEVER_A_LOSS_SLACK = 1 - 0.95 / NEVER_A_LOSS_BOUND
EXPOSED_BOUND_PERCENT = 15.0
# Of the time of one row: what another costs on a GPU that is bound by bandwidth.
CHEAP_ROW = 0.004

# Workload, streams and temperature.
CellKey = tuple[str, int, float]
Ratio = Callable[[Sequence[LoopBlock]], Interval | None]
Judge = Callable[[str, str, Interval], Goal]
_BEST_FIXED: Judge = partial(at_least, bound=BEST_FIXED_BOUND, unit="x")
# Workloads whose prompts were there while drafts and settings were chosen.
_READ = {*PROMPT_SETS, MIXED}


@asynccontextmanager
async def start(run: Run) -> AsyncIterator[Mapping[str, LoopSide]]:
    """Start one stack, whose gateway answers every arm."""
    options = run.options
    given = StackOptions(
        model=options.model,
        draft_model=options.draft_model or None,
        dtype=options.dtype,
        threads=options.threads,
    )
    async with Stack(given) as stack, AsyncClient(stack.gateways[0]) as client:
        yield dict.fromkeys(options.arms, stack_loop(stack, client))


def limits(blocks: Sequence[LoopBlock], cells: Mapping[CellKey, list[LoopBlock]]) -> dict[str, list[str]]:
    """Return by cell the most that a fixed k could gain with drafts that cost nothing.

    That is max over k of E(k) T(n) / T(n (1 + k)), with the expected tokens E by the acceptance of the cell's
    fixed arms, T the times of this run's steps by rows, and n streams. The second figure has rows that cost
    CHEAP_ROW of one row each. Where the first is below a goal, no choice of k can meet the goal here.
    """
    times = pass_times(blocks)
    found = {}
    for (workload, streams, temperature), mine in sorted(cells.items()):
        of = speculated(block for block in mine if block.load.arm not in {OFF, AUTO})
        if times is None or not of.verified:
            continue
        expected = [1 + sum(of.by_position[:k]) for k in range(len(of.by_position) + 1)]
        found[f"{workload}, {streams} streams at {temperature:g}"] = [
            _best_gain(expected, streams, times),
            _best_gain(expected, streams, lambda rows: 1 + CHEAP_ROW * (rows - 1)),
        ]
    return found


def _best_gain(expected: Sequence[float], streams: int, time_of: Callable[[int], float]) -> str:
    gains = [tokens * time_of(streams) / time_of(streams * (1 + k)) for k, tokens in enumerate(expected)]
    best = max(range(len(gains)), key=lambda k: gains[k])
    return f"{gains[best]:.2f}x with k = {best}"


def goals(run: Run) -> list[Goal]:
    """Return every goal for which there are blocks."""
    cells: dict[CellKey, list[LoopBlock]] = defaultdict(list)
    for block in run.blocks:
        cells[block.load.workload, block.load.streams, block.load.temperature].append(block)
    run.facts["limits"] = limits(run.blocks, cells)
    return [
        *_mean("alone", ALONE_BOUND, run.blocks, 1),
        *_mean("unread", ALONE_BOUND, [b for b in run.blocks if b.load.workload not in _READ], 1, (0.0,)),
        *_mean("at-eight", AT_EIGHT_BOUND, run.blocks, 8, (0.0,)),
        *_rewrite(cells),
        *_in_every_cell(
            "never-a-loss",
            "auto against off",
            cells,
            _against_off,
            partial(at_least, bound=NEVER_A_LOSS_BOUND, unit="x", slack=NEVER_A_LOSS_SLACK),
        ),
        *_in_every_cell(
            "best-fixed", "auto against the best fixed choice", cells, _against_fixed, _BEST_FIXED
        ),
        *_exposed(run.blocks),
    ]


def _mean(
    name: str,
    bound: float,
    blocks: Sequence[LoopBlock],
    streams: int,
    temperatures: Sequence[float] | None = None,
) -> list[Goal]:
    """Bound the mean over the workloads at each temperature; None: at all that were measured."""
    workloads = sorted({block.load.workload for block in blocks if block.load.streams == streams})
    of = "1 stream" if streams == 1 else f"{streams} streams"
    what = f"tokens/s of auto against off, mean of {', '.join(workloads)}, {of}"
    measured = sorted({block.load.temperature for block in blocks})
    ratios = {
        temperature: mean_ratio(blocks, AUTO, OFF, streams, temperature)
        for temperature in measured
        if temperatures is None or temperature in temperatures
    }
    return [
        at_least(name, f"{what} at {temperature:g}", ratio, bound, "x")
        for temperature, ratio in ratios.items()
        if ratio is not None
    ]


def _rewrite(cells: Mapping[CellKey, list[LoopBlock]]) -> list[Goal]:
    ratios = {
        temperature: _against_off(blocks)
        for (workload, streams, temperature), blocks in sorted(cells.items())
        if (workload, streams) == ("rewrite", 1)
    }
    what = "tokens/s of auto against off on rewrite, 1 stream at"
    return [
        at_least("rewrite", f"{what} {temperature:g}", ratio, REWRITE_BOUND, "x")
        for temperature, ratio in ratios.items()
        if ratio is not None
    ]


def _in_every_cell(
    name: str, what: str, cells: Mapping[CellKey, list[LoopBlock]], ratio_of: Ratio, judge: Judge
) -> list[Goal]:
    """Return one goal for each number of streams, that of the worst cell; it is met if all cells meet it."""
    found = []
    for streams in sorted({streams for _, streams, _ in cells}):
        ratios = {cell: ratio_of(blocks) for cell, blocks in cells.items() if cell[1] == streams}
        known = {cell: ratio for cell, ratio in ratios.items() if ratio is not None}
        if not known:
            continue
        each = {cell: judge(name, what, ratio) for cell, ratio in known.items()}
        # A missed cell is worse than a met one.
        worst = min(each, key=lambda cell: (each[cell].met, known[cell].median))
        missed = sum(not goal.met for goal in each.values())
        title = (
            f"{what}, {streams} streams, every workload and temperature: worst {worst[0]} at {worst[2]:g}, "
            f"{missed} of {len(each)} missed"
        )
        found.append(judge(name, title, known[worst]))
    return found


def _against_off(blocks: Sequence[LoopBlock]) -> Interval | None:
    return speed_ratio(of_arm(blocks, AUTO), of_arm(blocks, OFF))


def _against_fixed(blocks: Sequence[LoopBlock]) -> Interval | None:
    """Return the worst ratio of auto against a fixed choice, k = 0 among them."""
    fixed = {block.load.arm for block in blocks} - {AUTO}
    ratios = [speed_ratio(of_arm(blocks, AUTO), of_arm(blocks, arm)) for arm in sorted(fixed)]
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return None
    return min(known, key=lambda ratio: (_BEST_FIXED("", "", ratio).met, ratio.median))


def _exposed(blocks: Sequence[LoopBlock]) -> list[Goal]:
    """Bound the share of a round that the target waited for the draft: over all loads, and at one stream."""
    found = []
    for name, mine in (("all loads", of_arm(blocks, AUTO)), ("1 stream", of_arm(blocks, AUTO, 1))):
        pairs: dict[int, list[LoopBlock]] = defaultdict(list)
        for block in mine:
            pairs[block.load.pair].append(block)
        sums = [speculated(of) for of in pairs.values()]
        what = f"exposed draft wait of auto, share of the rounds' time, {name}"
        if not all(of.round_ns for of in sums):
            bound = f"<= {EXPOSED_BOUND_PERCENT:g} %"
            found.append(Goal("exposed", what, "a pair without rounds", bound, met=False))
        elif sums:
            share = median_interval([100 * of.exposed_share for of in sums])
            found.append(at_most("exposed", what, share, EXPOSED_BOUND_PERCENT, " %"))
    return found


SPECULATION = Scenario(
    "speculation",
    "what speculation gains and costs: off, auto and a fixed choice, 1 to 64 streams, six workloads",
    Options(
        (OFF, AUTO, "hybrid-8"), (1, 8, 16, 32, 64), workloads=(*PROMPT_SETS, TASKS, MIXED), max_tokens=40
    ),
    OFF,
    start,
    goals,
    primed_by=OFF,
    required=frozenset({OFF, AUTO}),
)

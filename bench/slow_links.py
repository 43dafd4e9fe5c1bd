"""`make bench-slow-links`: what is left of the speed where 20 ms each way lie before target and draft.

The real default model in bfloat16, one thread a service, and an oracle draft that is right 19 times in 20.
Gateways of one kind reach target and draft through relays (bench/relay.py): of 0 ms (`near`), of 20 ms
(`far`), and of 20 ms before the store as well (`far-store`). One stream, temperature 0, the four workloads in
turn; speculation off, fixed at k = 4, and auto. Every prompt is answered once before, which teaches the
oracle, and leaves the prompt in the target's cache for all arms alike.

Blocks of a pair go through all arms, in the next pair backwards. `--quick` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.closed_loop import block_record
from bench.harness import BENCH, MIN_PAIRS, Goal, at_least, write_record
from bench.measured import measure_and_report
from bench.slow_links_run import FAR, FAR_STORE, NEAR, LinkOptions, Outcome, arm_of, measure
from galley.bench import plots, tables
from galley.bench.closed_loop import LoopBlock
from galley.bench.gateway import OFF
from galley.bench.report import as_dict, report_of
from galley.bench.summary import speed_ratio
from galley.bench.workloads import PROMPT_SETS, prompt_hash

BOUND = 0.8
_FILE_WIDTH = 150
_QUICK_TOKENS = 24


def goals(blocks: Sequence[LoopBlock], options: LinkOptions) -> list[Goal]:
    """Far against near, for each way to speculate; that the store is far too is no goal."""
    found = []
    for how in options.speculations[1:]:
        far, near = (of_arm(blocks, arm_of(place, how)) for place in (FAR, NEAR))
        ratio = speed_ratio(far, near)
        if ratio is not None:
            what = f"tokens/s of {how} with {options.delay_ms:g} ms each way against 0 ms"
            found.append(at_least("slow-links", what, ratio, BOUND, "x"))
    return found


def others(blocks: Sequence[LoopBlock], options: LinkOptions) -> dict[str, str]:
    """The same ratio where nothing is asked of it."""
    named = [(FAR_STORE, how) for how in options.speculations] + [(FAR, OFF)]
    ratios = {
        arm_of(place, how): speed_ratio(of_arm(blocks, arm_of(place, how)), of_arm(blocks, arm_of(NEAR, how)))
        for place, how in named
    }
    return {arm: str(ratio) for arm, ratio in ratios.items() if ratio is not None}


def of_arm(blocks: Sequence[LoopBlock], arm: str) -> list[LoopBlock]:
    """Those of one arm."""
    return [block for block in blocks if block.load.arm == arm]


def report(
    outcome: Outcome, options: LinkOptions, console: Console, where: dict[str, Any], record: Path | None
) -> None:
    """Print tables and goals; with `record`, leave JSON and plot there."""
    baseline = arm_of(NEAR, OFF)
    found = report_of(outcome.blocks, baseline, options.model)
    reached = [] if options.quick else goals(outcome.blocks, options)
    facts = outcome.facts | {
        "differing_answers": outcome.differing,
        "against_near": others(outcome.blocks, options),
    }
    console.print(tables.speed_table(found.rows, baseline))
    console.print(tables.acceptance_table(found.acceptance))
    lines = [f"{name}: {said}" for name, said in facts.items()]
    if record is not None:
        figures = {
            "name": "slow_links",
            **where,
            "options": dataclasses.asdict(options),
            "prompt_sha256": {name: prompt_hash(name) for name in PROMPT_SETS},
            "facts": facts,
            **as_dict(found),
            "goals": [dataclasses.asdict(goal) for goal in reached],
            "blocks": [block_record(block) for block in outcome.blocks],
        }
        write_record(record, figures)
        plots.draw(record.with_suffix(".png"), found.rows, found.acceptance, found.predicted, baseline)
        lines.append(f"record: {record}")
    for line in (*lines, "goal | what | measured | bound | met", *map(str, reached)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def parse_options(argv: Sequence[str]) -> tuple[LinkOptions, Path | None]:
    """Read the command line; exits 2 with a message if a value is wrong. The path is None for no record."""
    default = LinkOptions()
    parser = argparse.ArgumentParser(
        prog="python -m bench.slow_links",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--pairs", type=int, default=default.pairs, help=f"at least {MIN_PAIRS}")
    add("--prompts", type=int, default=default.prompts, help="of a block")
    add("--max-tokens", type=int, default=default.max_tokens)
    add("--delay-ms", type=float, default=default.delay_ms, help="each way")
    add("--oracle-spoil", type=float, default=default.oracle_spoil, help="how often the draft is wrong")
    add("--k", type=int, default=default.k)
    add("--cores", type=int, default=default.cores, help="of this machine")
    add("--threads", type=int, default=default.threads, help="a service")
    add("--dtype", default=default.dtype)
    add("--model", default=default.model, help="default: the stack's own")
    add("--seed", type=int, default=default.seed)
    add("--quick", action="store_true", help="one short pair, no record, no goals")
    add("--results", type=Path, default=BENCH / "results")
    given = vars(parser.parse_args(argv))
    root: Path | None = given.pop("results")
    options = LinkOptions(**given)
    if options.quick:
        short = min(_QUICK_TOKENS, options.max_tokens)
        return dataclasses.replace(options, pairs=1, prompts=1, max_tokens=short), None
    if options.pairs < MIN_PAIRS:
        parser.error(f"--pairs: at least {MIN_PAIRS}")
    if min(options.prompts, options.max_tokens, options.k, options.threads) < 1 or options.delay_ms < 0:
        parser.error("--prompts, --max-tokens, --k and --threads: at least 1; --delay-ms: at least 0")
    return options, root


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 however the goals stand, for a missed goal is a finding and no error."""
    options, root = parse_options(sys.argv[1:] if argv is None else argv)
    measure_and_report("slow_links", options, root, _FILE_WIDTH, measure, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

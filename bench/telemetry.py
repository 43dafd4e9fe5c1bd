"""`make bench-telemetry`: what traces and metrics cost, at 16 streams of the default stack.

Arms, each answered by a real stack of its own processes (gateway, target, draft, Valkey):

- `off`: no endpoint, no metrics port; `off-again`: another start of the same, so that it is seen by how much
  two starts of one thing differ. The other arms are compared with the mean of both.
- `sampled-1` and `sampled-100`: one stack with traces on, whose sampler takes one request in 100, but follows
  a caller that samples its own trace: so do all callers of `sampled-100`. Hence both arms run in the same
  processes, and their ratio is what sampling costs without the difference between two starts.
- `sampled-100-metrics`: all requests are sampled, and /metrics of each service is fetched each second.

Why so:

- Whether there is a provider at all is settled when a process starts, so `off` needs processes of its own.
  Two starts of the same program differ by a per cent or so (memory layout; the target measures at its start
  what passes cost, and decides by that how many draft tokens it verifies). So all stacks are started anew
  `--lives` times, `off` is there twice, and the ratio of these two is printed as what cannot be told apart.
- Stacks live side by side, and one at a time is asked, in blocks that alternate; those that wait do next to
  nothing. A start takes ten times as long as a block, so stacks that were started for each block would leave
  too few pairs.
- All arms of a pair answer the same prompts with the same seeds, and so give the very same tokens; the record
  counts answers that differ. Each arm is a caller of its own (an API key), and prefix caches never cross
  callers: so no arm finds the prompts of another.
- Spans are exported up to a second late (OTEL_BSP_SCHEDULE_DELAY=1000, a fifth of the default: more exports,
  not fewer). So CPU time is counted until --settle-s after a block, for all arms alike; what came later still
  stands in the record. Speed is of the block alone: the exports of its last second are not in it.
- Temperatures 0 and 0.7 take turns from pair to pair.

The collector is a process outside what is counted that drops what it is sent unread (bench/otlp_sink.py); it
shares the cores, as do the callers, so what it takes of them stands in the table. CPU a token is given by
process: that tells which part is the limit. Six pairs in each of three lives take about 12 minutes on two
cores. `--quick` runs one short pair, whose figures mean nothing.
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
from bench.harness import BENCH, MIN_PAIRS, write_record
from bench.measured import measure_and_report
from bench.options import numbers
from bench.telemetry_plots import draw, table
from bench.telemetry_run import Outcome, TelemetryOptions, measure
from bench.telemetry_summary import ALL, Row, differing, finely, goals_of, limit_of, rows_of, sampling_alone
from galley.bench.workloads import PROMPT_SETS, prompt_hash

_FILE_WIDTH = 170
_QUICK_STREAMS, _QUICK_TOKENS = 2, 12


def facts_of(outcome: Outcome, rows: Sequence[Row]) -> dict[str, Any]:
    """What is seen besides the rows."""
    alone = sampling_alone(outcome.blocks, outcome.costs)
    pays = limit_of(next(row for row in rows if row.arm == ALL))
    return {
        **outcome.facts,
        "differing_answers": differing(outcome.blocks),
        "sampling_in_the_same_processes": {name: finely(ratio) for name, ratio in alone.items()},
        "cpu_added_by_sampling_all": pays,
    }


def report(
    outcome: Outcome,
    options: TelemetryOptions,
    console: Console,
    where: dict[str, Any],
    record: Path | None,
) -> None:
    """Print table and goals; with `record`, leave JSON and plot there."""
    rows = rows_of(outcome.blocks, outcome.costs)
    facts = facts_of(outcome, rows)
    goals = [] if options.quick else goals_of(rows, options.streams)
    console.print(table(rows))
    lines = [f"{key}: {value}" for key, value in facts.items()]
    if record is not None:
        found = {
            "name": "telemetry",
            **where,
            "options": dataclasses.asdict(options),
            "prompt_sha256": {prompt_set: prompt_hash(prompt_set) for prompt_set in PROMPT_SETS},
            "facts": facts,
            "rows": [dataclasses.asdict(row) for row in rows],
            "goals": [dataclasses.asdict(goal) for goal in goals],
            "costs": [dataclasses.asdict(cost) for cost in outcome.costs],
            "blocks": [block_record(block) for block in outcome.blocks],
        }
        write_record(record, found)
        draw(record.with_suffix(".png"), rows)
        lines.append(f"record: {record}")
    for line in (*lines, "goal | what | measured | bound | met", *map(str, goals)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def parse_options(argv: Sequence[str]) -> tuple[TelemetryOptions, Path | None]:
    """Read the command line; exits 2 with a message if a value is wrong. The path is None for no record."""
    default = TelemetryOptions()
    parser = argparse.ArgumentParser(
        prog="python -m bench.telemetry",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--lives", type=int, default=default.lives, help="starts of all stacks")
    add("--pairs", type=int, default=default.pairs, help=f"of each life; at least {MIN_PAIRS} in all")
    add("--streams", type=int, default=default.streams)
    add("--turns", type=int, default=default.turns, help="prompts a stream, in a block")
    add("--max-tokens", type=int, default=default.max_tokens, help="of an answer, in the mean")
    add("--temperatures", type=numbers, default=default.temperatures, help="take turns")
    add("--speculation", default=default.speculation, help="auto, off or <strategy>-<k>")
    add("--settle-s", type=float, default=default.settle_s, help="after a block, for what is exported late")
    add("--cores", type=int, default=default.cores, help="of this machine")
    add("--threads", type=int, default=default.threads, help="a service")
    add("--dtype", default=default.dtype)
    add("--kv-memory-mb", type=int, default=default.kv_memory_mb, help="of each target")
    add("--model", default=default.model, help="default: the stack's own")
    add("--seed", type=int, default=default.seed)
    add("--quick", action="store_true", help="one short pair, no record, no goals")
    add("--results", type=Path, default=BENCH / "results")
    given = vars(parser.parse_args(argv))
    root: Path | None = given.pop("results")
    options = TelemetryOptions(**given)
    if min(options.lives, options.pairs, options.streams, options.turns, options.max_tokens) < 1:
        parser.error("--lives, --pairs, --streams, --turns and --max-tokens: at least 1")
    if options.settle_s < 0:
        parser.error("--settle-s: at least 0")
    if options.quick:
        short = min(_QUICK_TOKENS, options.max_tokens)
        quick = dataclasses.replace(options, lives=1, pairs=1, turns=1, max_tokens=short)
        return dataclasses.replace(quick, streams=min(_QUICK_STREAMS, options.streams)), None
    if options.lives * options.pairs < MIN_PAIRS:
        parser.error(f"--pairs: at least {MIN_PAIRS} in all lives together")
    return options, root


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 however the goals stand, for a missed goal is a finding and no error."""
    options, root = parse_options(sys.argv[1:] if argv is None else argv)
    measure_and_report("telemetry", options, root, _FILE_WIDTH, measure, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-speculation`: what speculation gains and costs, with the real default pair in bfloat16.

Arms: off (plain decoding), auto (the gateway chooses), the fixed strategies (ngram, model, hybrid) at k =
2, 4 and 8, and at one stream transformers' assisted generation with the same draft, its reduced head spread
over the whole vocabulary. Gateway, draft, target and Valkey are real processes, one thread each, on two
cores; the peer is one process on the same cores. Closed loops of 1, 8, 16 and 32 streams, the four
workloads, temperatures 0 and 0.7, in alternating blocks.

The budget. Every fixed arm in every pair would take hours. So each is scouted by one block in each cell,
and only the best go into the pairs beside off and auto: two at one stream, one at more (--fixed-alone 9
--fixed 9 for all; --streams, --sets, --temperatures, --strategies, --k for some). Answers are short, shorter
where many stream (--busy-max-tokens), and prompts are cached for all arms alike, for else blocks would be
prefill for a great part, and show little of what decoding gains or loses. What was left out stands in the
record. The plan's estimate is printed first: plain decoding's times for every block.

Each arm has labels of its own in each cell and pair: the draft learns from recent answers of a label, and
nobody may copy what another arm said (galley/bench/blocks.py).

The closed form: at temperature 1 the model draft's measured acceptance beside what its and the
target's distributions at those very positions say (bench/closed_form.py), computed off-line by
transformers.

`--quick` only shows that everything runs: its figures mean nothing, and its goals are not judged.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.arms import PEERS
from bench.closed_loop import block_record
from bench.harness import Goal, write_record
from bench.measured import measure_and_report
from bench.speculation_goals import goals
from bench.speculation_options import SpeculationOptions, parse_options
from bench.speculation_run import Outcome, measure
from galley.bench import plots, tables
from galley.bench.gateway import OFF
from galley.bench.report import Report, as_dict, report_of
from galley.bench.workloads import prompt_hash
from galley.common.config.defaults import DEFAULT_MODEL

_FILE_WIDTH = 150


def report(
    outcome: Outcome,
    options: SpeculationOptions,
    console: Console,
    where: dict[str, Any],
    record: Path | None,
) -> list[Goal]:
    """Print tables, goals and the sentence; with `record`, leave JSON and plot there."""
    scouted = len({block.load.arm for block in outcome.scouted})
    reached = [] if options.quick else goals(outcome.blocks, outcome.agreement, scouted)
    pair = f"{options.model or DEFAULT_MODEL} and its draft"
    # The peer's rounds are unknown, and the sentence is about us.
    ours = [block for block in outcome.blocks if block.load.arm not in PEERS]
    found = report_of(outcome.blocks, OFF, pair)
    conclusion = report_of(ours, OFF, pair).conclusion
    if outcome.blocks:
        _print_tables(found, console)
    _print_facts(outcome, console)
    if record is not None:
        write_record(record, _record(found, outcome, options, where, reached) | {"conclusion": conclusion})
        if outcome.blocks:
            plots.draw(record.with_suffix(".png"), found.rows, found.acceptance, found.predicted, OFF)
        console.print(f"record: {record}")
    for line in (conclusion, "goal | what | measured | bound | met", *map(str, reached)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return reached


def _print_tables(found: Report, console: Console) -> None:
    console.print(tables.speed_table(found.rows, OFF))
    console.print(tables.acceptance_table(found.acceptance))
    console.print(tables.prediction_table(found.rows, found.predicted))


def _print_facts(outcome: Outcome, console: Console) -> None:
    said = [f"left out: {what}" for what in outcome.left_out]
    if outcome.agreement is not None:
        said.append(f"closed form: {dataclasses.asdict(outcome.agreement)}")
    for line in said:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _record(
    found: Report,
    outcome: Outcome,
    options: SpeculationOptions,
    where: dict[str, Any],
    reached: Sequence[Goal],
) -> dict[str, Any]:
    return {
        "name": "speculation",
        **where,
        "options": dataclasses.asdict(options),
        "prompt_sha256": {name: prompt_hash(name) for name in options.sets},
        "left_out": outcome.left_out,
        "facts": outcome.facts,
        "paired_fixed_arms": [
            {"workload": workload, "streams": streams, "temperature": temperature, "arms": arms}
            for (workload, streams, temperature), arms in outcome.best.items()
        ],
        "closed_form": None if outcome.agreement is None else dataclasses.asdict(outcome.agreement),
        **as_dict(found),
        "goals": [dataclasses.asdict(goal) for goal in reached],
        "scouted": [block_record(block) for block in outcome.scouted],
        "blocks": [block_record(block) for block in outcome.blocks],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0 however the goals stand, for a missed goal is a finding and no error."""
    options, root = parse_options(sys.argv[1:] if argv is None else argv, __doc__)
    measure_and_report("speculation", options, root, _FILE_WIDTH, measure, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

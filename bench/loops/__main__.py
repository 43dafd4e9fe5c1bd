"""Run a loop benchmark: `python -m bench.loops SCENARIO [flags]`.

Each of several streams sends its next prompt when its answer has ended. Arms are compared in alternating
blocks of the same run. The table gives the median of the pairs' ratios and its 95 % interval. The last lines
give the bound, the measured value and the outcome of each goal. `--quick` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import command
from bench.harness import Goal, prompt_hashes, result_path, show_goals, write_record
from bench.loops.base import LOOPS
from bench.loops.http import BESIDE_GRPC
from bench.loops.latency import LATENCY
from bench.loops.options import Options, parse
from bench.loops.run import Run, Scenario, keep_to_cores, measure
from bench.loops.sessions import SESSIONS
from bench.loops.slow_links import SLOW_LINKS
from bench.loops.speculation import SPECULATION
from bench.loops.structured import MASKS, PREDICTED, STRUCTURED
from bench.loops.telemetry import TELEMETRY
from bench.peers.scenarios import ENGINES, PEERS, THROUGHPUT
from galley.bench import plots
from galley.bench.report import acceptance_table, as_dict, report_of, speed_table
from galley.engine.load.resolve import resolve_model

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        LOOPS,
        THROUGHPUT,
        SPECULATION,
        SLOW_LINKS,
        SESSIONS,
        TELEMETRY,
        PEERS,
        ENGINES,
        BESIDE_GRPC,
        LATENCY,
        STRUCTURED,
        PREDICTED,
        MASKS,
    )
}


def report(
    scenario: Scenario, run: Run, goals: Sequence[Goal], record: Path | None, console: Console
) -> None:
    """Print tables, facts and goals; with `record`, write JSON there and a plot beside it."""
    options = run.options
    found = report_of(run.blocks, scenario.baseline, options.model)
    console.print(speed_table(found.rows, scenario.baseline))
    if found.acceptance:
        console.print(acceptance_table(found.acceptance))
    lines = [f"{key}: {value}" for key, value in run.facts.items()]
    if record is not None:
        figures: dict[str, Any] = {
            "options": dataclasses.asdict(options),
            "prompt_sha256": prompt_hashes(*options.prompts),
            "facts": run.facts,
            **as_dict(found),
            "goals": [dataclasses.asdict(goal) for goal in goals],
        }
        write_record(record, figures)
        plots.draw(record.with_suffix(".png"), found)
        lines.append(f"record: {record}")
    show_goals(console, goals, lines)


def parse_arguments(argv: Sequence[str]) -> tuple[Scenario, Options, Path | None]:
    """Return the scenario, its options and the folder of the record; exit 2 for a wrong value."""
    listed = "\n".join(f"  {name:12} {scenario.about}" for name, scenario in SCENARIOS.items())
    usage = argparse.ArgumentParser(
        prog="python -m bench.loops",
        description=f"{__doc__}\nScenarios:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usage.add_argument("scenario", choices=SCENARIOS)
    scenario = SCENARIOS[usage.parse_args(argv[:1]).scenario]
    about = sys.modules[scenario.start.__module__].__doc__
    parser = command.parser_of(f"bench.loops {scenario.name}", about)
    options, root = parse(parser, argv[1:], scenario.defaults, scenario.required)
    if problem := scenario.check(options):
        parser.error(problem)
    return scenario, options, root


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 even if a goal is missed, which is a finding and no error."""
    scenario, options, root = parse_arguments(sys.argv[1:] if argv is None else argv)
    console = command.console()
    cores = keep_to_cores(options.cores)
    model_dir = resolve_model(options.model)
    show = partial(console.print, style="dim", markup=False)
    run = asyncio.run(measure(scenario, options, model_dir, show))
    run.facts["cores"] = cores
    goals = [] if options.quick else scenario.goals(run)
    report(scenario, run, goals, None if root is None else result_path(scenario.name, root), console)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make soak`: half an hour at the highest load that holds, an overload, and what is left at the end.

It runs a real stack, each part in its own process, and real clients.

1. It finds the highest load that holds. Streams are closed loops: each client makes its next call when its
   last has ended. N streams hold if, over a probe, no call is refused or fails, every answer of the catalogue
   is the one of an idle stack, no stream is without a token for longer than 10 s (30 s for its first), and
   every sample finds a free block at the target, so that no session was preempted. Shares of what the
   gateway admits, less 4 places, are tried; the first that holds is taken.
2. It writes every block of the target's pool once, warms up, and runs --minutes of that load: prompts and
   answers of mixed lengths, three temperatures, all modes of speculation; some clients cancel, abort, or
   leave and resume. In every second block some of the places belong to misreaders, half of which read slowly
   and half not at all, over windows of 1 KiB. In the other blocks ordinary clients have these places. The
   pace of the others is compared between the blocks of a pair.
3. It runs --fold times as many clients for a minute. A refused client returns after the time that the
   refusal names. Throughput is back at the first moment whose next half minute reaches 95 % of that before.
4. It checks what is left after the last call (bench/soak/leaks.py).

Memory growth is computed by process (bench/soak/memory.py), over the soak alone. `--quick` only shows that
everything runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import command
from bench.harness import Goal, prompt_hashes, result_path, show_goals, write_record
from bench.soak import plot as soak_plot
from bench.soak.clients import Arrival
from bench.soak.goals import goals_of, growths
from bench.soak.memory import Sample
from bench.soak.options import SoakOptions, parse_options
from bench.soak.outcome import Outcome, Span, rate
from bench.soak.run import measure
from galley.bench.summary import percentile

_PLOTTED_S = 10.0


def report(
    outcome: Outcome, goals: Sequence[Goal], options: SoakOptions, console: Console, record: Path | None
) -> None:
    """Print facts and goals; with `record`, write JSON there and a plot beside it."""
    facts = facts_of(outcome)
    for name, value in facts.items():
        console.print(f"{name}: {value}", markup=False, highlight=False, soft_wrap=True)
    if record is not None:
        found = {
            "options": dataclasses.asdict(options),
            "prompt_sha256": prompt_hashes(),
            "facts": facts,
            "goals": [dataclasses.asdict(goal) for goal in goals],
            "samples": [_plain(sample, outcome.samples[0].at_s) for sample in outcome.samples],
        }
        write_record(record, found)
        rates = [_rate_around(arrivals_of(outcome), sample.at_s) for sample in outcome.samples]
        soak_plot.draw(record.with_suffix(".png"), outcome.samples, spans_of(outcome), rates)
        console.print(f"record: {record}")
    show_goals(console, goals)


def facts_of(outcome: Outcome) -> dict[str, Any]:
    """Return the facts that are printed beside the goals."""
    facts: dict[str, Any] = {
        **outcome.facts,
        "streams": outcome.streams,
        "probes": [dataclasses.asdict(probe) for probe in outcome.probes],
        "left": None if outcome.left is None else dataclasses.asdict(outcome.left),
    }
    if outcome.heard is not None and outcome.samples:
        soaked = [sample for sample in outcome.samples if outcome.soaked.holds(sample.at_s)]
        facts["ended"] = outcome.heard.ended
        facts["tokens_per_s"] = round(rate(outcome.heard.arrivals, outcome.soaked), 1)
        facts["memory"] = {name: dataclasses.asdict(one) for name, one in growths(soaked).items()}
        facts["rss_mib"] = {
            name: round(max(sample.processes[name].rss for sample in soaked) / 2**20, 1)
            for name in soaked[0].processes
        }
    if outcome.overload is not None:
        facts["overload"] = _overload_facts(outcome)
    return facts


def _overload_facts(outcome: Outcome) -> dict[str, Any]:
    overload = outcome.overload
    if overload is None:
        return {}
    arrivals = [*overload.ordinary.arrivals, *overload.extra.arrivals]
    refusals = [*overload.ordinary.refusals, *overload.extra.refusals]
    took_ms = [1000 * one.took_s for one in refusals] or [0.0]
    told_s = [one.retry_after_s or 0.0 for one in refusals] or [0.0]
    names = ("before", "during", "after")
    spans = (overload.before, overload.during, overload.after)
    return {
        "tokens_per_s": {
            name: round(rate(arrivals, span), 1) for name, span in zip(names, spans, strict=True)
        },
        "refusals": len(refusals),
        "refused_after_it": sum(one.at_s > overload.during.last_s for one in refusals),
        "refusal_ms": {str(at): round(percentile(took_ms, at), 1) for at in (50, 99, 100)},
        "told_to_wait_s": {str(at): round(percentile(told_s, at), 1) for at in (50, 99, 100)},
        "our_loop_late_ms": {
            str(at): round(1000 * percentile(overload.lag_s or [0.0], at), 1) for at in (50, 99, 100)
        },
        "ended": {"ordinary": overload.ordinary.ended, "extra": overload.extra.ended},
    }


def arrivals_of(outcome: Outcome) -> list[Arrival]:
    """Return the arrivals of all judged phases."""
    heard = [outcome.heard]
    if outcome.overload is not None:
        heard += [outcome.overload.ordinary, outcome.overload.extra]
    return [arrival for one in heard if one is not None for arrival in one.arrivals]


def spans_of(outcome: Outcome) -> dict[str, Span]:
    """Return the time spans of the judged phases."""
    spans = {"soak": outcome.soaked}
    return spans if outcome.overload is None else {**spans, "overload": outcome.overload.during}


def _rate_around(arrivals: Sequence[Arrival], at_s: float) -> float:
    return rate(arrivals, Span(at_s - _PLOTTED_S, at_s + _PLOTTED_S))


def _plain(sample: Sample, begin_s: float) -> dict[str, Any]:
    return {**dataclasses.asdict(sample), "at_s": round(sample.at_s - begin_s, 2)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; return 0 even if a goal is missed, which is a finding and no error."""
    options, root = parse_options(sys.argv[1:] if argv is None else argv, __doc__)
    console = command.console()
    record = None if root is None else result_path("soak", root)
    began_s = time.monotonic()

    def log(message: str) -> None:
        console.print(
            f"{time.monotonic() - began_s:.0f} s: {message}", style="dim", markup=False, soft_wrap=True
        )

    outcome = asyncio.run(measure(options, log))
    report(outcome, [] if options.quick else goals_of(outcome), options, console, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

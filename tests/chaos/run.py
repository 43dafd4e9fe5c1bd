"""Disturb every process and link of a stack under streams, again and again: `make chaos`.

The tokens of sixteen streams are compared with those of an undisturbed run; none may be lost or doubled. The
run measures how long the slowest stream waits for its next token after each kind of disturbance, writes it to
bench/results/chaos.json, and prints a line for each goal. The same seed gives the same disturbances in the
same order. The exit status is 1 if a stream differs, is lost, or waits for longer than a minute; a missed
goal does not change it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import BENCH, commit, machine, result_path, write_record
from tests.chaos.disturbances import KILL, disturbances
from tests.chaos.goals import goals, p95
from tests.chaos.trial import Measured, save_model, trial

DEFAULT_COUNT = 680
"""Three quarters of the disturbances are kills: at least 500."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if no stream was harmed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument("--count", type=int, default=DEFAULT_COUNT, help="disturbances")
    parser.add_argument("--kills-only", action="store_true", help="SIGKILL alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--logs", type=Path, help="where to keep what the parts say")
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="galley-chaos-") as folder:
        record = asyncio.run(run(Path(folder), given))
    path = result_path("chaos", given.results)
    write_record(path, record)
    print(f"{'held' if record['held'] else 'FAILED: ' + record['problem']}; written to {path}")
    print("goal | what | measured | bound | met")
    for goal in record["goals"]:
        print(" | ".join((*list(goal.values())[:-1], "met" if goal["met"] else "missed")))
    return 0 if record["held"] else 1


async def run(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run all disturbances and return the record of the run."""
    (folder / "model").mkdir()
    model = save_model(folder / "model")
    planned = disturbances(given.count, given.seed, kills_only=given.kills_only)
    measured: list[Measured] = []
    problem = ""
    where, about = commit(), machine()
    async with trial(
        model, given.streams, given.max_tokens, given.seed, given.logs or folder / "logs"
    ) as under:
        await under.learn()
        under.start()
        began_s = time.monotonic()
        try:
            for number, disturbance in enumerate(planned, start=1):
                measured.append(await under.disturb(disturbance))
                said = f"{number}/{len(planned)} {' -> '.join(disturbance.where)} {disturbance.what}"
                print(f"{time.monotonic() - began_s:.0f} s: {said}: {measured[-1].worst_s:.2f} s", flush=True)
            await under.finish()
        except Exception as error:  # noqa: BLE001  # any error is the result of the run
            problem = f"after {len(measured)} disturbances: {type(error).__name__}: {error}"
        took_s = time.monotonic() - began_s
        answers = sum(stream.answers for stream in under.streams)
        tokens = sum(stream.tokens for stream in under.streams)
    return {
        "name": "chaos",
        "commit": where,
        "machine": about,
        "options": {
            name: str(value) for name, value in vars(given).items() if name not in {"results", "logs"}
        },
        "held": not problem,
        "problem": problem,
        "goals": [dataclasses.asdict(goal) for goal in goals(measured, given.streams, answers, problem)],
        "minutes": round(took_s / 60, 1),
        "disturbances": len(measured),
        "killed": sum(one.disturbance.what == KILL for one in measured),
        "whole_answers": answers,
        "tokens_compared": tokens,
        "seconds_to_the_next_token_of_the_slowest_stream": _summaries(
            _by_kind([(one.disturbance.kind, one.worst_s) for one in measured])
        ),
        "seconds_until_it_was_back": _summaries(under.mended_s),
        "seconds_until_the_store_answered": _summaries(
            _by_kind([(one.disturbance.kind, one.restart_s) for one in measured if one.restart_s])
        ),
    }


def _by_kind(values: Sequence[tuple[str, float]]) -> dict[str, list[float]]:
    kinds: dict[str, list[float]] = defaultdict(list)
    for kind, value in values:
        kinds[kind].append(value)
    return kinds


def _summaries(kinds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    return {kind: _summary(seconds) for kind, seconds in sorted(kinds.items())}


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "count": len(seconds),
        "median": round(median(seconds), 3),
        "p95": round(p95(seconds), 3),
        "max": round(max(seconds), 3),
    }


if __name__ == "__main__":
    sys.exit(main())

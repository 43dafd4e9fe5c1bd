"""Disturb every process and link of a stack, and its store's file and clock, under streams: `make chaos`.

The tokens of sixteen streams are compared with those of an undisturbed run without speculation, one stream
at a time; none may be lost or doubled. The run measures how long the slowest stream waits for its next token
after each kind of event, writes it to bench/results/chaos.json, and prints a line for each goal. The same
seed gives the same events; one that needs a pool in which a process restarts is put off. The exit status is
1 if a stream differs, is lost, or waits for longer than two minutes; a missed goal does not change it.

With `--engine vllm` the targets run their model in vLLM, events are fewer, a stream may wait for five
minutes, and the record is bench/results/chaos-vllm.json. vLLM's answers are its own undisturbed ones,
compared token by token. That is exact where a target measured that the bits of a token do not depend on its
step, as it does in float32 on the CPU; `deterministic` of the record is what the targets measured.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import BENCH, commit, machine, result_path, write_record
from tests.chaos import packets
from tests.chaos.disturbances import CLOCK, CUTS, DAMAGES, KILL, PLANS, Event, count_of, events
from tests.chaos.goals import goals, p95
from tests.chaos.http_streams import HttpStream
from tests.chaos.trial import Measured, Trial, save_model, trial

NO_CLOCK = "none: libfaketime is not installed"


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 if no stream was harmed, else 1."""
    given = parsed(argv)
    if packets.is_usable() and not packets.is_isolated():
        packets.isolate(["-m", "tests.chaos.run", *(sys.argv[1:] if argv is None else argv)])
    with tempfile.TemporaryDirectory(prefix="galley-chaos-") as folder:
        record = asyncio.run(run(Path(folder), given))
    path = result_path(record["name"], given.results)
    write_record(path, record)
    print(f"{'held' if record['held'] else 'FAILED: ' + record['problem']}; written to {path}")
    print("goal | what | measured | bound | met")
    for goal in record["goals"]:
        print(" | ".join((*list(goal.values())[:-1], "met" if goal["met"] else "missed")))
    return 0 if record["held"] else 1


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; those that depend on the engine are filled in."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument("--engine", choices=sorted(PLANS), default="paged", help="engine of the targets")
    parser.add_argument(
        "--count", type=int, help="events of one or two disturbances (default: 667, with vllm 60)"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="when to stop")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--logs", type=Path, help="where to keep what the parts say")
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    if given.count is None:
        given.count = PLANS[given.engine].events
    return given


def record_name(engine: str) -> str:
    """Return the name of the record of a run, one for each engine."""
    return "chaos" if engine == "paged" else f"chaos-{engine}"


async def run(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run all disturbances and return the record of the run."""
    (folder / "model").mkdir()
    model = save_model(folder / "model")
    plan = PLANS[given.engine]
    planned = events(given.count, given.seed, plan)
    measured: list[Measured] = []
    problem = ""
    where, about = commit(), machine()
    async with trial(
        model, given.streams, given.max_tokens, given.seed, given.logs or folder / "logs", given.engine
    ) as under:
        is_deterministic = await under.is_deterministic()
        await under.learn()
        under.start()
        began_s = time.monotonic()
        try:
            for number in range(1, len(planned) + 1):
                if time.monotonic() - began_s > given.minutes * 60:
                    break
                event = planned.pop(under.first_possible(planned))
                measured.append(await under.disturb(*event))
                said = f"{number}/{number + len(planned)} {_said(event)}: {measured[-1].worst_s:.2f} s"
                print(f"{time.monotonic() - began_s:.0f} s: {said}", flush=True)
            await under.finish()
        except Exception as error:  # noqa: BLE001  # any error is the result of the run
            problem = f"after {len(measured)} events: {type(error).__name__}: {error}"
        took_s = time.monotonic() - began_s
        answers = sum(stream.answers for stream in under.streams)
        tokens = sum(stream.tokens for stream in under.streams)
    return {
        "name": record_name(given.engine),
        "commit": where,
        "machine": about,
        "options": {
            name: str(value) for name, value in vars(given).items() if name not in {"results", "logs"}
        },
        "held": not problem,
        "problem": problem,
        "goals": [
            dataclasses.asdict(goal) for goal in goals(measured, plan, given.streams, answers, problem)
        ],
        "minutes": round(took_s / 60, 1),
        **_counts(measured, under),
        "deterministic": is_deterministic,
        "whole_answers": answers,
        "tokens_compared": tokens,
        "seconds_to_the_next_token_of_the_slowest_stream": _summaries(
            _by_kind([(one.kind, one.worst_s) for one in measured])
        ),
        "seconds_until_it_was_back": _summaries(under.mended_s),
        "seconds_until_the_store_answered": _summaries(
            _by_kind([(one.kind, one.restart_s) for one in measured if one.restart_s and len(one.event) == 1])
        ),
    }


def _counts(measured: Sequence[Measured], under: Trial) -> dict[str, Any]:
    struck = [one.event for one in measured]
    ended: Counter[str] = Counter()
    for stream in under.streams:
        ended += stream.ended
    return {
        "events": len(struck),
        "two_at_once": sum(len(event) > 1 for event in struck),
        "killed": count_of(struck, {KILL}),
        "cut": count_of(struck, CUTS),
        "cut_by_packet_filter": under.strikes.dropped,
        "store_files_damaged": count_of(struck, DAMAGES),
        "store_files_repaired": under.strikes.repaired,
        "clock_steps": count_of(struck, {CLOCK}) if under.links.clock.can_step else NO_CLOCK,
        "streams_by_http": sum(isinstance(stream, HttpStream) for stream in under.streams),
        "resumed_by_last_event_id": sum(
            stream.resumed for stream in under.streams if isinstance(stream, HttpStream)
        ),
        "clients_that_gave_up_and_resumed": sum(stream.given_up for stream in under.streams),
        "calls_refused_by_a_busy_gateway": sum(stream.refused for stream in under.streams),
        "changes_of_build": sum(stream.rebuilt for stream in under.streams),
        "answers_ended_after_damage_or_clock_steps": dict(ended),
    }


def _said(event: Event) -> str:
    return " and ".join(f"{' -> '.join(one.where)} {one.what} {one.lasts_s:.1f}" for one in event)


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

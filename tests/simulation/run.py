"""Run many schedules: `make simulate`, the long form of `test_simulation.py`.

Each seed is one schedule. Writes how many there were, from which seed on, at which commit and in what time to
bench/results/simulation/<commit>.json. A seed that fails is run again, shrunk and printed:

    python -m tests.simulation.run --seed 4711 --schedules 1
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from bench.harness import commit, result_path, write_record
from tests.simulation.seeds import schedule_of
from tests.simulation.shrink import shrink
from tests.simulation.world import Outcome, quiet, run_schedule

_CHUNK = 50
_SHOWN = 3
_TAIL = 60


@dataclass(frozen=True, slots=True)
class Part:
    """The outcome of some of the schedules."""

    schedules: int
    events: int
    virtual_s: float
    met: Counter[str]
    violations: tuple[tuple[int, str], ...]


def play(seeds: range) -> Part:
    """Run the schedules of these seeds, one after the other."""
    with quiet():
        outcomes = [run_schedule(schedule_of(seed)) for seed in seeds]
    return part_of(outcomes)


def part_of(outcomes: list[Outcome]) -> Part:
    met: Counter[str] = Counter()
    for outcome in outcomes:
        met.update(outcome.met)
    return Part(
        len(outcomes),
        sum(outcome.events for outcome in outcomes),
        sum(outcome.virtual_s for outcome in outcomes),
        met,
        tuple((outcome.seed, outcome.violation) for outcome in outcomes if outcome.violation),
    )


def main() -> int:
    """Exit status 0 if no rule was broken."""
    options = _options()
    seeds = range(options.seed, options.seed + options.schedules)
    began_s = time.monotonic()
    parts = list(_progress(seeds, options.workers, began_s))
    seconds = time.monotonic() - began_s
    violations = [violation for part in parts for violation in part.violations]
    for seed, _ in violations[:_SHOWN]:
        explain(seed)
    report = _report(seeds, parts, violations, seconds)
    _say(json.dumps({name: report[name] for name in ("schedules", "seconds", "per_minute")}))
    if not options.dry:
        path = result_path("simulation")
        write_record(path, report)
        _say(f"written to {path}")
    return 1 if violations else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--dry", action="store_true", help="write no result")
    return parser.parse_args()


def _progress(seeds: range, workers: int, began_s: float) -> Iterator[Part]:
    """The parts as they come, with a line now and then."""
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    done, told_s = 0, began_s
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for part in pool.map(play, chunks):
            done += part.schedules
            for seed, rule in part.violations:
                _say(f"seed {seed}: {rule}")
            if time.monotonic() - told_s > 10:
                told_s = time.monotonic()
                _say(f"{done} of {len(seeds)}, {60 * done / (told_s - began_s):.0f} a minute")
            yield part


def explain(seed: int) -> None:
    """Run a seed that failed again, shrink it, and print what is left and how it ends."""
    with quiet():
        whole = run_schedule(schedule_of(seed))
        again = run_schedule(schedule_of(seed))
        small = shrink(schedule_of(seed), lambda tried: run_schedule(tried).violation is not None)
        shown = run_schedule(small, keep=True)
    same = "the same again" if whole.trace == again.trace else "NOT the same again"
    _say(f"\nseed {seed}: {whole.violation}\ntrace {whole.trace}, {same}\n\nshrunk to: {small}\n")
    _say("\n".join([*shown.lines[-_TAIL:], str(shown.violation)]))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _report(
    seeds: range, parts: list[Part], violations: list[tuple[int, str]], seconds: float
) -> dict[str, object]:
    met: Counter[str] = Counter()
    for part in parts:
        met.update(part.met)
    return {
        "commit": commit(),
        "schedules": len(seeds),
        "first_seed": seeds[0],
        "last_seed": seeds[-1],
        "seconds": round(seconds, 1),
        "per_minute": round(60 * len(seeds) / seconds),
        "virtual_hours": round(sum(part.virtual_s for part in parts) / 3600, 1),
        "events": sum(part.events for part in parts),
        "met": dict(met.most_common()),
        "violations": [{"seed": seed, "rule": rule} for seed, rule in violations],
    }


if __name__ == "__main__":
    sys.exit(main())

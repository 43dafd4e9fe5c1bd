"""Run many schedules: `make simulate`, the long form of `test_simulation.py`.

Each seed is one schedule. The number of schedules, the first seed, the commit and the time are written to
bench/results/simulation.json, with the seed at which each mutant (`mutants.py`) is detected. SIGINT (Ctrl-C)
ends a run early: what was reported is recorded. --continue goes on after the last seed of that record, if
what is simulated has not changed since its commit. A seed that fails is run again, shrunk and printed:

    python -m tests.simulation.run --seed 4711 --schedules 1
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from bench.harness import result_path, write_record
from tests.simulation.mutants import MUTANTS
from tests.simulation.schedule import Schedule
from tests.simulation.schedules.seeds import schedule_of
from tests.simulation.world import Outcome, quiet, run_schedule

T = TypeVar("T")

_CHUNK = 50
_EXPLAINED = 3
_TAIL = 60
_ROOT = Path(__file__).parents[2]
_SIMULATED = ("galley", "services", "tests/simulation", "tests/fakes")
MOST_MUTANT_SEEDS = 2000
"""Every mutant must be detected within this many seeds."""


@dataclass(frozen=True, slots=True)
class Part:
    schedules: int
    events: int
    virtual_s: float
    met: Counter[str]
    violations: tuple[tuple[int, str], ...]


def play(seeds: range) -> Part:
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
    """Return the exit status: 0 if no rule was violated, else 1."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if a shell runs this in the background
    options = _options()
    path = result_path("simulation")
    before = unfinished(path) if options.more else None
    first, done = (before["last_seed"] + 1, before["schedules"]) if before else (options.seed, 0)
    seeds = range(first, first + options.schedules - done)
    began_s, cpu_before_s = time.monotonic(), _workers_cpu_s()
    parts = list(_progress(seeds, options.workers, began_s))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what follows takes a minute or two
    seconds, cpu_s = time.monotonic() - began_s, _workers_cpu_s() - cpu_before_s
    seeds = seeds[: sum(part.schedules for part in parts)]
    if not seeds:
        return 1
    violations = [violation for part in parts for violation in part.violations]
    for seed, _ in violations[:_EXPLAINED]:
        explain(seed)
    report = report_of(seeds, parts, violations, seconds, cpu_s)
    _print(json.dumps({name: report[name] for name in ("schedules", "seconds", "per_cpu_minute")}))
    if before:
        report = continued(before, report)
    elif not options.dry:
        report["mutants"] = _detected(options.workers)
    if not options.dry:
        write_record(path, report)
        _print(f"written to {path}")
    return 1 if report["violations"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--schedules", type=int, default=200_000, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--dry", action="store_true", help="write no result")
    parser.add_argument(
        "--continue",
        dest="more",
        action="store_true",
        help="add to the record until it has so many schedules; --seed is not read",
    )
    return parser.parse_args()


def unfinished(path: Path) -> dict[str, Any]:
    """Return the record that a run is to continue. Raises SystemExit if other code made it."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    commit = str(record["commit"])
    same = subprocess.run(("git", "diff", "--quiet", commit, "--", *_SIMULATED), cwd=_ROOT, check=False)
    if same.returncode != 0:
        changed = ", ".join(_SIMULATED)
        raise SystemExit(f"{path.name} is of commit {commit}; {changed} are not as they were then")
    return record


def continued(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the report of both runs together, with the commit and the mutants of the first."""
    cpu_minutes = sum(part["schedules"] / part["per_cpu_minute"] for part in (before, after))
    met = Counter(before["met"])
    met.update(after["met"])
    added = {
        name: round(before[name] + after[name], 1)
        for name in ("schedules", "seconds", "virtual_hours", "events")
    }
    return {
        "commit": before["commit"],
        "runs": before.get("runs", 1) + 1,
        **added,
        "first_seed": before["first_seed"],
        "last_seed": after["last_seed"],
        "per_cpu_minute": round(added["schedules"] / cpu_minutes),
        "met": dict(met.most_common()),
        "violations": before["violations"] + after["violations"],
        "mutants": before["mutants"],
    }


def _workers_cpu_s() -> float:
    """Return the CPU time of all processes that have ended, with their start."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _workers(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_begin_work)


def _begin_work() -> None:
    """Let the garbage collector leave alone what is imported, and the main process handle SIGINT."""
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _progress(seeds: range, workers: int, began_s: float) -> Iterator[Part]:
    chunks = [seeds[at : at + _CHUNK] for at in range(0, len(seeds), _CHUNK)]
    done, reported_s = 0, began_s
    with _workers(workers) as pool:
        try:
            for part in pool.map(play, chunks):
                done += part.schedules
                for seed, rule in part.violations:
                    _print(f"seed {seed}: {rule}")
                if time.monotonic() - reported_s > 10:
                    reported_s = time.monotonic()
                    _print(f"{done} of {len(seeds)}, {60 * done / (reported_s - began_s):.0f} a minute")
                yield part
        except KeyboardInterrupt:
            _print(f"stopped after {done} of {len(seeds)}")
            pool.shutdown(cancel_futures=True)


def _detected(workers: int) -> dict[str, object]:
    """Return the seed and the rule by which each mutant is detected; None if it is not."""
    names = [mutant.name for mutant in MUTANTS]
    with _workers(workers) as pool:
        found = pool.map(detect, names)
        return {
            name: result and {"seed": result[0], "rule": result[1]}
            for name, result in zip(names, found, strict=True)
        }


def detect(name: str, most_seeds: int = MOST_MUTANT_SEEDS) -> tuple[int, str] | None:
    """Return the first seed that violates a rule with this mutant, and the rule."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    with mutant.put_in(), quiet():
        for seed in range(most_seeds):
            violation = run_schedule(schedule_of(seed, mutant.theme), mutant.kinds).violation
            if violation:
                return seed, violation
    return None


def explain(seed: int) -> None:
    """Run a failed seed again, shrink its schedule, and print the rest and the end of its trace."""
    with quiet():
        whole = run_schedule(schedule_of(seed))
        again = run_schedule(schedule_of(seed))
        small = shrink(schedule_of(seed), lambda tried: run_schedule(tried).violation is not None)
        shrunk = run_schedule(small, keep=True)
    same = "the same again" if whole.trace == again.trace else "NOT the same again"
    _print(f"\nseed {seed}: {whole.violation}\ntrace {whole.trace}, {same}\n\nshrunk to: {small}\n")
    _print("\n".join([*shrunk.lines[-_TAIL:], str(shrunk.violation)]))


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Return a schedule that fails and passes without any single one of its faults or sessions."""
    while True:
        smaller = _with_fewer_sessions(_with_fewer_faults(schedule, fails), fails)
        if smaller == schedule:
            return schedule
        schedule = smaller


def _with_fewer_faults(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    return schedule.with_faults(_fewest(schedule.faults, lambda kept: fails(schedule.with_faults(kept))))


def _with_fewer_sessions(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    return schedule.with_sessions(
        _fewest(schedule.sessions, lambda kept: bool(kept) and fails(schedule.with_sessions(kept)))
    )


def _fewest(items: tuple[T, ...], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Return fewer items that still fail: leave out halves, then quarters, ... of them (delta debugging)."""
    size = len(items)
    while size >= 1:
        start = 0
        while start < len(items):
            kept = items[:start] + items[start + size :]
            if fails(kept):
                items = kept
            else:
                start += size
        size //= 2
    return items


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def report_of(
    seeds: range, parts: list[Part], violations: list[tuple[int, str]], seconds: float, cpu_s: float
) -> dict[str, Any]:
    """Return what a run found. `seconds` passed, and its processes used `cpu_s`."""
    met: Counter[str] = Counter()
    for part in parts:
        met.update(part.met)
    return {
        "schedules": len(seeds),
        "first_seed": seeds[0],
        "last_seed": seeds[-1],
        "seconds": round(seconds, 1),
        "per_cpu_minute": round(60 * len(seeds) / cpu_s),
        "virtual_hours": round(sum(part.virtual_s for part in parts) / 3600, 1),
        "events": sum(part.events for part in parts),
        "met": dict(met.most_common()),
        "violations": [{"seed": seed, "rule": rule} for seed, rule in violations],
    }


if __name__ == "__main__":
    sys.exit(main())

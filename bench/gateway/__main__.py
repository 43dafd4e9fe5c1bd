"""Measure the gateway alone: `python -m bench.gateway [flags]`.

Targets and drafts answer at once, over real gRPC; the store is a real Valkey; clients run in a process of
their own. CPU time is that of the gateway's processes, which noise of the machine moves less than wall time.

- `paced`: the CPU of a token at a rate that a gateway carries, for several numbers of streams.
- `saturated`: the targets answer as fast as they can.
- `overload`: answers begin 1.5 times as often as the gateway can end them.
- `telemetry`: a gateway that traces every request and serves metrics, beside one that does neither.
- `gateways`: 1, 2, 4 and 8 gateways share one load.

A verdict has one token, or six of which five were drafted.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import command
from bench.gateway.report import COLUMNS, draw, goals, row_of, summary, table_of, telemetry_ratio
from bench.gateway.run import ONE, PARTS, SIX, Bench, Cell, Options
from bench.harness import commit, machine, result_path, show_goals, write_record
from bench.loops.options import integers, names
from galley.common.models.files import DEFAULT_MODEL
from galley.engine.load.resolve import resolve_model

_NAME = "gateway"
_VERDICTS = {"one": (ONE,), "six": (SIX,), "both": (ONE, SIX)}
_WIDTH = 190


def parse(argv: Sequence[str]) -> tuple[Options, argparse.Namespace]:
    """Return the options; exit 2 for a wrong value."""
    default = Options()
    parser = command.parser_of("bench.gateway", __doc__)
    parser.add_argument("--parts", type=names, default=default.parts, help="default: all")
    parser.add_argument("--streams", type=integers, default=default.streams)
    parser.add_argument("--verdicts", choices=_VERDICTS, default="both", help="tokens of a verdict")
    parser.add_argument("--rate", type=float, default=default.rate, help="verdicts of one token a second")
    parser.add_argument("--drafted-rate", type=float, default=default.drafted_rate, help="verdicts of six")
    parser.add_argument("--blocks", type=int, default=default.blocks, help="blocks of a cell")
    parser.add_argument("--pairs", type=int, default=default.pairs, help="pairs of the part telemetry")
    parser.add_argument("--window-s", type=float, default=default.window_s)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model whose tokenizer is used")
    given = parser.parse_args(argv)
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"--parts: must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    for name in ("blocks", "pairs", "window_s", "rate", "drafted_rate"):
        if getattr(given, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: must be above 0, got {getattr(given, name):g}")
    if min(given.streams) < 1:
        parser.error(f"--streams: must be at least 1, got {min(given.streams)}")
    options = Options(
        parts=given.parts,
        streams=given.streams,
        verdicts=_VERDICTS[given.verdicts],
        rate=given.rate,
        drafted_rate=given.drafted_rate,
        blocks=given.blocks,
        pairs=given.pairs,
        window_s=given.window_s,
        profile=not given.quick,
    )
    return options, given


def record(path: Path, bench: Bench) -> None:
    """Write the parts that were run into the record; it keeps the other parts of an earlier run."""
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    parts = before.get("parts", {})
    for part in bench.options.parts:
        cells = [cell for cell in bench.cells if cell.part == part]
        parts[part] = {
            "commit": commit(),
            "machine": machine(),
            "cells": summary(cells),
            "profiles": {name: asdict(of) for name, of in bench.profiles.items() if name.startswith(part)},
            "goals": [dataclasses.asdict(goal) for goal in goals(cells)],
        }
    write_record(path, {"name": _NAME, "options": asdict(bench.options), "parts": parts})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 even if a goal is missed, which is a finding and no error."""
    options, given = parse(sys.argv[1:] if argv is None else argv)
    console = command.console(_WIDTH)

    def report(cell: Cell) -> None:
        console.print(" | ".join(row_of(cell)), markup=False, highlight=False, soft_wrap=True)

    console.print(" | ".join(COLUMNS), markup=False, highlight=False, soft_wrap=True)
    bench = Bench(options, resolve_model(given.model), report)
    asyncio.run(bench.run())
    console.print(table_of(bench.cells))
    if (ratio := telemetry_ratio(bench.cells)) is not None:
        console.print(f"CPU a token with all telemetry: {ratio}x", markup=False)
    for name, profile in bench.profiles.items():
        console.print(f"profile, {name}: {profile.packages}", markup=False, soft_wrap=True)
    if given.quick:
        return 0
    show_goals(console, goals(bench.cells))
    path = result_path(_NAME, given.results)
    record(path, bench)
    draw(path.with_suffix(".png"), bench.cells)
    console.print(f"record: {path}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

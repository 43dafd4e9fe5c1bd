"""Run 100 gateways, 20 drafts and 50 targets on virtual time: `make prove-scale`.

The load is what `galley plan --capacity` says that the fleet carries. The run shows whether it does, and how
far the plan's formulas are from what the real session machines, routing and schedulers do: the share of time
that each tier works, the time of a token, and the open sessions.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import RESULTS, Goal, commit, machine, result_path, write_record
from galley.core.cost.model import RowCostCurve, StepTimes
from galley.plan.capacity import (
    NO_DRAFT,
    DraftSize,
    Load,
    Point,
    TargetSize,
    Tiers,
    point,
    tokens_per_verdict,
)
from tests.simulation.scale.fleet import Fleet, Size
from tests.simulation.scale.parts import Costs

_MS = 1_000_000
CURVE = RowCostCurve(((1, 1.0), (64, 1.1), (128, 1.25), (256, 1.6), (512, 2.4), (1024, 4.2)))
TARGET = TargetSize(step_ms=10.0, kv_tokens=1 << 17, row_costs=CURVE, max_sessions=128, max_rows=512)
DRAFT = DraftSize(alpha=0.6, cost_ratio=12.0, max_k=4)
_PROMPT_TOKENS = 64
BUSY = 0.7
MOST_OFF = 0.15


@dataclass(frozen=True, slots=True)
class Shape:
    """The processes and the answers of a run, of `output_tokens` in the mean, and whether it drafts."""

    gateways: int = 100
    drafts: int = 20
    targets: int = 50
    stores: int = 12
    answers: int = 100_000
    output_tokens: int = 12
    drafted: bool = True
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Compared:
    """What a fleet did, beside what the plan's formulas give for the same load."""

    what: str
    measured: float
    planned: float


def load_of(shape: Shape) -> Load:
    """Return the load that full targets carry, but for the spare time of `BUSY`."""
    load = Load(answers_per_s=1.0, prompt_tokens=_PROMPT_TOKENS, output_tokens=shape.output_tokens)
    at = point(load, TARGET, _draft(shape), TARGET.max_sessions)
    return replace(load, answers_per_s=shape.targets * BUSY * at.tokens_per_s / load.output_tokens)


def _draft(shape: Shape) -> DraftSize:
    return DRAFT if shape.drafted else NO_DRAFT


def size_of(shape: Shape, load: Load) -> Size:
    """Return the fleet."""
    times = StepTimes.measured([(rows, round(TARGET.step_ms * cost * _MS)) for rows, cost in CURVE.points])
    costs = Costs(
        times=times,
        draft_ns=lambda sessions: round(TARGET.step_ms * CURVE(sessions) / DRAFT.cost_ratio * _MS),
        kv_tokens=TARGET.kv_tokens,
        max_sessions=TARGET.max_sessions,
        max_rows=TARGET.max_rows,
    )
    return Size(
        gateways=shape.gateways,
        drafts=shape.drafts if shape.drafted else 0,
        targets=shape.targets,
        stores=shape.stores,
        answers=shape.answers,
        answers_per_s=load.answers_per_s,
        prompt_tokens=load.prompt_tokens,
        output_tokens=load.output_tokens,
        costs=costs,
        alpha=DRAFT.alpha,
        k=at_load(shape, load).k,
        seed=shape.seed,
    )


def at_load(shape: Shape, load: Load) -> Point:
    """Return a target at the least number of sessions that carries its part of the load."""
    tokens_per_s = load.answers_per_s * load.output_tokens / shape.targets
    points = (point(load, TARGET, _draft(shape), count) for count in range(1, TARGET.max_sessions + 1))
    return next(at for at in points if at.tokens_per_s >= tokens_per_s)


def compare(fleet: Fleet, shape: Shape, load: Load) -> list[Compared]:
    """Return the tiers' work, the time of a token and the open sessions, measured and planned."""
    at, tally, tiers = at_load(shape, load), fleet.tally, Tiers()
    seconds = fleet.steady_ns / 1e9
    answers_per_s, tokens_per_s = tally.ended / seconds, tally.tokens / seconds
    verdicts_per_s = tokens_per_s / tokens_per_verdict(at)
    return [
        Compared("answers/s", answers_per_s, load.answers_per_s),
        Compared("ms a token", tally.decoded_ns / tally.decoded / _MS, at.time_per_output_token_ms),
        Compared("verdicts/s", tally.verdicts / seconds, verdicts_per_s),
        Compared(
            "gateway cores",
            fleet.busy["gateways"],
            tiers.gateway_cores(answers_per_s, tokens_per_s, verdicts_per_s),
        ),
        Compared("store cores", fleet.busy["stores"], tiers.store_cores(answers_per_s, verdicts_per_s, 0.0)),
    ]


def goals_of(fleet: Fleet, compared: Sequence[Compared], name: str) -> list[Goal]:
    """Judge a run: every answer right, none refused, and no more needed than planned.

    Without drafts, the plan must also need no more than the run: how many of their tokens arrive in time
    depends on the load, and the plan takes the least.
    """
    tally = fleet.tally
    found = [
        Goal("right", f"{name}: wrong answers", str(tally.wrong), "0", not tally.wrong),
        Goal("room", f"{name}: refused calls", str(tally.refusals), "0", not tally.refusals),
    ]
    for one in compared:
        what, measured = f"{name}: {one.what}, {one.planned:.4g} planned", f"{one.measured:.4g}"
        least = 0.0 if fleet.drafts else 1 - MOST_OFF
        bound = f"at most {MOST_OFF:.0%} more" if fleet.drafts else f"within {MOST_OFF:.0%}"
        met = least <= one.measured / one.planned <= 1 + MOST_OFF
        found.append(Goal("plan", what, measured, bound, met))
    return found


def run(shape: Shape) -> tuple[Fleet, list[Compared]]:
    """Run a fleet, and compare it with the plan."""
    load = load_of(shape)
    fleet = Fleet(size_of(shape, load)).run()
    return fleet, compare(fleet, shape, load)


def main(argv: Sequence[str] | None = None) -> int:
    """Run with and without drafts; return 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default = Shape()
    for name in ("gateways", "drafts", "targets", "stores", "answers", "output_tokens", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    parser.add_argument("--only", choices=RUNS, help="one run; the record keeps the other")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    given = vars(parser.parse_args(argv))
    only, results = given.pop("only"), given.pop("results")
    path = result_path("scale", results)
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else {}
    wrong = 0
    for name, changes in RUNS.items():
        if only in {None, name}:
            wrong += _run_and_print(name, replace(Shape(**given), **changes), runs)
            write_record(path, {"commit": commit(), "machine": machine(), "runs": runs})
    return 1 if wrong else 0


RUNS: dict[str, dict[str, Any]] = {
    "plain": {"drafted": False},
    "drafted": {},
}


def _run_and_print(name: str, shape: Shape, runs: dict[str, Any]) -> int:
    began_s = time.process_time()
    fleet, compared = run(shape)
    goals = goals_of(fleet, compared, name)
    tally = fleet.tally
    runs[name] = {
        "shape": dataclasses.asdict(shape),
        "answers_per_s": round(fleet.size.answers_per_s, 1),
        "virtual_s": round(fleet.events.now / 1e9, 1),
        "cpu_s": round(time.process_time() - began_s),
        "most_open": fleet.most_open,
        "steady_answers": tally.ended,
        "first_token_ms": [round(float(ns) / _MS, 1) for ns in np.percentile(tally.first_ns, (50, 90, 99))],
        "compared": [dataclasses.asdict(one) for one in compared],
        "goals": [dataclasses.asdict(goal) for goal in goals],
    }
    lines = (f"{name}: {key}: {value}" for key, value in runs[name].items() if not isinstance(value, list))
    for line in (*lines, *map(str, goals)):
        sys.stdout.write(line + "\n")
    return tally.wrong


if __name__ == "__main__":
    sys.exit(main())

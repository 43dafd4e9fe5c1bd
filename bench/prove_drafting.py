"""Prove that AUTO keeps up with the best fixed k: `make prove-drafting`.

It is the long form of tests/simulation/test_speculation.py. On virtual time (tests/fakes/pool_world.py: real
session machines and a real scheduler, given costs and acceptance) AUTO is compared with each fixed k, over
kinds of drafts, costs of rows, costs of drafting and numbers of sessions. Writes all figures to
bench/results/drafting.json, and prints each scenario below the bound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from functools import partial

from bench.harness import result_path, write_record
from galley.core.cost.model import StepTimes
from tests.fakes.pool_world import MS, Pool, Scenario

BOUND = 0.95
FIXED = (0, 1, 2, 4, 8, 16)
MAX_K = 16

ROWS = {
    "as measured": ((1, 17), (4, 18), (8, 21), (16, 29), (32, 46), (64, 80), (128, 150), (256, 290)),
    "free": ((1, 20), (512, 20.001)),
    "linear": ((1, 10), (2, 20)),
    "in steps": ((1, 10), (8, 10.01), (9, 18), (16, 18.01), (17, 30), (32, 30.01), (33, 60), (256, 200)),
}
ALPHAS: dict[str, Callable[[int], float]] = {
    "useless": lambda _: 0.0,
    "poor": lambda _: 0.15,
    "fair": lambda _: 0.5,
    "good": lambda _: 0.8,
    "nearly perfect": lambda _: 0.97,
    "drifts": lambda i: 0.1 + 0.8 * (i % 500) / 500,
    "collapses and returns": lambda i: 0.0 if 250 <= i < 500 else 0.8,
}
DRAFT_MS = {"a lookup": 0.05, "a small model": 1.5}
TOKENS = {1: 800, 8: 300, 32: 80}


def main() -> int:
    """Run the proof; return 0 if AUTO reached the bound in every scenario."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2, help="runs of each scenario (default: %(default)s)")
    arguments = parser.parse_args()
    cells = list(itertools.product(ROWS, ALPHAS, DRAFT_MS, TOKENS))
    results = [compare(*cell, seeds=arguments.seeds) for cell in cells]
    missed = [result for result in results if not result["met"]]
    report = {
        "bound": BOUND,
        "fixed": FIXED,
        "seeds": arguments.seeds,
        "scenarios": len(results),
        "met": len(results) - len(missed),
        "worst": min(results, key=ratio_of),
        "results": results,
    }
    write_record(result_path("drafting"), report)
    for result in sorted(missed, key=ratio_of):
        print("below the bound:", json.dumps(result))
    print(
        f"{report['met']} of {report['scenarios']} scenarios at >= {BOUND} of the best fixed k in hindsight"
    )
    return 1 if missed else 0


def compare(rows: str, alpha: str, draft: str, sessions: int, *, seeds: int) -> dict[str, object]:
    """Return one scenario's tokens per second with AUTO and each fixed k, as means over the seeds."""
    totals = dict.fromkeys((*map(str, FIXED), "auto"), 0.0)
    for seed in range(seeds):
        scenario = Scenario(
            ALPHAS[alpha],
            StepTimes.measured([(count, round(ms * MS)) for count, ms in ROWS[rows]]),
            partial(_draft_ns, DRAFT_MS[draft]),
            sessions,
            TOKENS[sessions],
            seed=seed,
        )
        for k in FIXED:
            totals[str(k)] += Pool(scenario, k, auto=False).goodput()
        totals["auto"] += Pool(scenario, MAX_K, auto=True).goodput()
    best = max(FIXED, key=lambda k: totals[str(k)])
    ratio = totals["auto"] / totals[str(best)]
    return {
        "rows": rows,
        "acceptance": alpha,
        "draft": draft,
        "sessions": sessions,
        "tokens_per_s": {name: round(total / seeds, 1) for name, total in totals.items()},
        "best_fixed_k": best,
        "ratio": round(ratio, 3),
        "met": ratio >= BOUND,
    }


def ratio_of(result: dict[str, object]) -> float:
    """Return AUTO's speed over that of the best fixed choice."""
    return float(str(result["ratio"]))


def _draft_ns(one_ms: float, sessions: int) -> int:
    """Return the time of a draft's step: a sixteenth more for each further session."""
    return round(one_ms * MS * (15 + sessions) / 16)


if __name__ == "__main__":
    sys.exit(main())

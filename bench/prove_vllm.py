"""Prove the target over vLLM: `make prove-vllm`, the long form of tests/simulation/test_vllm_target.py.

Each schedule sends random requests, credit, cuts, rewrites, repeats, cancellations, deadlines, hints in time
and late, evictions and failed steps to a target over a stub of vLLM's engine core, whose blocks hold few of
the sessions. Every confirmed token is compared with the stub's own. At the end vLLM may hold nothing of a
session that has gone.

Seeds are independent of one another. Writes bench/results/vllm_proof.json; exits 1 if a schedule fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from bench.harness import BENCH, result_path, write_record
from tests.fakes.vllm_world import run_schedule

_BATCH = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof; return 0 if no schedule fails."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.prove_vllm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--schedules", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    began_s = time.monotonic()
    end = given.seed + given.schedules
    batches = [range(first, min(end, first + _BATCH)) for first in range(given.seed, end, _BATCH)]
    happened: Counter[str] = Counter()
    failures: list[str] = []
    with ProcessPoolExecutor(given.workers) as pool:
        for seeds, (counts, failed) in zip(batches, pool.map(run_schedules, batches), strict=True):
            happened += counts
            failures += failed
            print(f"seeds {seeds[0]} to {seeds[-1]}: {len(failed)} failed", flush=True)
    record = {
        "seconds": round(time.monotonic() - began_s, 1),
        "first_seed": given.seed,
        "schedules": given.schedules,
        "held": not failures,
        "failures": failures[:20],
        "happened": dict(sorted(happened.items())),
    }
    path = result_path("vllm_proof", given.results)
    write_record(path, record)
    print(f"record: {path}")
    print("FAILED" if failures else "held")
    return 1 if failures else 0


def run_schedules(seeds: range) -> tuple[Counter[str], list[str]]:
    """Return what happened in the schedules, and what failed in which."""
    happened: Counter[str] = Counter()
    failures: list[str] = []
    for seed in seeds:
        try:
            happened += run_schedule(seed).happened()
        except Exception as error:  # noqa: BLE001  # whatever it is, the proof has failed and says of what
            failures.append(f"seed {seed}: {error!r}")
    return happened, failures


if __name__ == "__main__":
    sys.exit(main())

"""Prove that clients do not notice when replicas of several ranks heal, shrink and grow: `make prove-ray`.

It is the long form of tests/e2e/test_ray_replicas.py, with the real default model in float32. Two replicas of
three ranks on a local Ray answer 16 streams while a rank is killed with SIGKILL, and 4 more while they are
scaled down to one. Every token must be transformers' own likeliest (a tie within 1e-4 is excused and
counted). The replica of the killed rank must be replaced while the other lives on, and the last one must keep
its session. The last trial ends with the death of Ray's head, after which no process may be left. Then a
deployment of a tiny model with --max-replicas must grow while it is busy and shrink when it idles. Writes
bench/results/ray.json; exits 1 if a trial fails.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from bench.harness import BENCH, result_path, write_record
from galley.common.models.files import DEFAULT_MODEL
from galley.engine.load.resolve import resolve_model
from tests.e2e.ray_trial import RANKS, REPLICAS, Trial
from tests.integration.services.ray import autoscale_trial


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof; return 0 if every trial held."""
    parser = argparse.ArgumentParser(prog="python -m bench.prove_ray", description=__doc__)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    directory = resolve_model(given.model)
    trials = []
    for number in range(given.trials):
        last = number == given.trials - 1
        trials.append(_run(Trial(directory, given.streams, given.max_tokens, lose_head=last)))
        print(f"trial {number + 1}: {trials[-1]}")
    autoscaling = _held(autoscale_trial.run)
    print(f"autoscaling: {autoscaling}")
    held = all(trial["held"] for trial in [*trials, autoscaling])
    record = {
        "options": {name: str(value) for name, value in vars(given).items() if name != "results"},
        "replicas": REPLICAS,
        "ranks": RANKS,
        "held": held,
        "trials": trials,
        "autoscaling": autoscaling,
    }
    path = result_path("ray", given.results)
    write_record(path, record)
    print(f"record: {path}")
    print("held" if held else "FAILED")
    return 0 if held else 1


def _run(trial: Trial) -> dict[str, Any]:
    return {**_held(trial.run), "ties": trial.ties, "seconds": trial.seconds}


def _held(run: Callable[[Path], Coroutine[Any, Any, Any]]) -> dict[str, Any]:
    """Run a trial in an empty folder; return whether it ended, and its result or error."""
    with tempfile.TemporaryDirectory(prefix="galley-prove-") as scratch:
        try:
            found = asyncio.run(run(Path(scratch)))
        except Exception as error:  # noqa: BLE001  # whatever it is, the proof has failed and says of what
            return {"held": False, "failure": repr(error)}
    return {"held": True, "failure": "", "found": found}


if __name__ == "__main__":
    sys.exit(main())

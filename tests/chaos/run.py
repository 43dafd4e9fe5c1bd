"""Kill, stop and restart every process of a stack under streams, again and again: `make chaos`.

Sixteen streams are compared, token by token, with what they were before anything was disturbed; none may be
lost, none doubled. How long each kind of disturbance keeps the last stream waiting for its next token is
measured and written to bench/results/chaos/<commit>.json. The same seed gives the same disturbances in the
same order. Exits 1 if a stream differs, is lost, or waits for longer than a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from bench.harness import BENCH, commit, machine, result_path, write_record
from tests.chaos.model import save_model
from tests.chaos.trial import KILL, disturbances, trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.trial import Measured

_PERCENT = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if nothing showed in any stream."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument("--count", type=int, default=600, help="disturbances")
    parser.add_argument("--kills-only", action="store_true", help="SIGKILL alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="galley-chaos-") as folder:
        record = asyncio.run(run(Path(folder), given))
    path = result_path("chaos", commit(), given.results)
    write_record(path, record)
    print(f"{'held' if record['held'] else 'FAILED: ' + record['problem']}; written to {path}")
    return 0 if record["held"] else 1


async def run(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The record of one run."""
    (folder / "model").mkdir()
    model = save_model(folder / "model")
    planned = disturbances(
        given.count, given.seed, (KILL,) if given.kills_only else (KILL, "SIGTERM", "SIGSTOP")
    )
    measured: list[Measured] = []
    problem = ""
    async with trial(model, given.streams, given.max_tokens, given.seed, folder / "logs") as under:
        await under.learn()
        under.start()
        try:
            for number, disturbance in enumerate(planned, start=1):
                measured.append(await under.disturb(disturbance))
                print(f"{number}/{len(planned)} {disturbance.kind}: {measured[-1].worst_s:.2f} s", flush=True)
            await under.finish()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the result
            problem = f"after {len(measured)} disturbances: {type(error).__name__}: {error}"
        answers = sum(stream.answers for stream in under.streams)
        tokens = sum(stream.tokens for stream in under.streams)
    return {
        "name": "chaos",
        "commit": commit(),
        "machine": machine(),
        "options": {name: str(value) for name, value in vars(given).items() if name != "results"},
        "held": not problem,
        "problem": problem,
        "disturbances": len(measured),
        "killed": sum(one.disturbance.what == KILL for one in measured),
        "whole_answers": answers,
        "tokens_compared": tokens,
        "seconds_to_the_next_token_of_the_last_stream": _by_kind(measured),
    }


def _by_kind(measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    waits: dict[str, list[float]] = defaultdict(list)
    for one in measured:
        waits[one.disturbance.kind].append(one.worst_s)
    return {kind: _summary(worst) for kind, worst in sorted(waits.items())}


def _summary(seconds: list[float]) -> dict[str, float]:
    p95 = quantiles(seconds, n=_PERCENT)[94] if len(seconds) > 1 else seconds[0]
    return {
        "count": len(seconds),
        "median": round(median(seconds), 3),
        "p95": round(min(p95, max(seconds)), 3),
        "max": round(max(seconds), 3),
    }


if __name__ == "__main__":
    sys.exit(main())

"""Prove that two gateways that claim one session at once never both extend its log: `make prove-ownership`.

It is the long form of test_ownership.py, with the gateways in processes of their own, over a real Valkey.
Each has a target that confirms its own letter only, so that the log shows which gateway wrote which token.
Half of the rounds are two `Generate` of one idempotency key, half two `Resume` of a session that a third
stream runs; with credit and without. Writes bench/results/ownership.json; exits 1 if it finds a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.harness import BENCH, result_path, write_record
from tests.fakes import tokenizer_files
from tests.fakes.redis_servers import VALKEY, running
from tests.fakes.world import World
from tests.integration.services.gateway.ownership import LENGTH, Tally, arena

CREDITS = (0, 32)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof; return 0 if in every log one owner follows another, without interleaving."""
    parser = argparse.ArgumentParser(prog="python -m bench.prove_ownership", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="contests (default: %(default)s)")
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    began = time.monotonic()
    tally = asyncio.run(contests(given.rounds))
    held = not tally.faults and tally.rounds >= given.rounds
    record = {
        "asked": given.rounds,
        "rounds": tally.rounds,
        "tokens_an_answer": LENGTH,
        "logs_of_two_owners": tally.handed_over,
        "streams": dict(tally.outcomes),
        "faults": tally.faults[:20],
        "seconds": round(time.monotonic() - began, 1),
        "held": held,
    }
    path = result_path("ownership", given.results)
    write_record(path, record)
    print(record)
    print(f"record: {path}")
    return 0 if held else 1


async def contests(rounds: int) -> Tally:
    """Run half of the rounds for each credit, rounded up; the two kinds of contest alternate."""
    tally = Tally()
    for credit in CREDITS:
        with (
            running(VALKEY) as store,
            tempfile.TemporaryDirectory(prefix="galley-") as folder,
            tempfile.TemporaryDirectory() as tokenizer,
        ):
            tokenizer_files.write(Path(tokenizer))
            async with (
                World(Path(folder), Path(tokenizer), store.url, credit) as world,
                arena(world, processes=True) as contestants,
            ):
                for number in range(-(-rounds // len(CREDITS))):
                    await contestants.contest(tally, under_way=number % 2 == 1)
    return tally


if __name__ == "__main__":
    sys.exit(main())

"""Prove that a gateway answers as its OpenAPI description says: `make prove-http`.

schemathesis makes cases from /openapi.json of a running gateway: valid ones, and as many that break it. No
response may be a 5xx, have a status that is not described, or a body that does not fit its description.
Writes bench/results/http_proof.json; exits 1 if it finds a fault.
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
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.server.server import Parts
from tests.fakes import tokenizer_files
from tests.fakes.redis_servers import VALKEY, running
from tests.fakes.world import World
from tests.integration.services.gateway.http.described import CHECK_NAMES, SHORT, Tally, check

LEAST_CASES = 2_000
CREDIT = 32


def main(argv: Sequence[str] | None = None) -> int:
    """Run the proof; return 0 if there were enough cases and all responses are as described."""
    parser = argparse.ArgumentParser(prog="python -m bench.prove_http", description=__doc__)
    parser.add_argument("--examples", type=int, default=120, help="cases a mode and operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=BENCH / "results")
    given = parser.parse_args(argv)
    began = time.monotonic()
    tally = asyncio.run(cases(given.examples, given.seed))
    held = not tally.faults and tally.cases >= LEAST_CASES
    record = {
        "seed": given.seed,
        "checks": list(CHECK_NAMES),
        "cases": tally.cases,
        "responses": {name: dict(sorted(counts.items())) for name, counts in tally.responses.items()},
        "faults": tally.faults,
        "seconds": round(time.monotonic() - began, 1),
        "held": held,
    }
    path = result_path("http_proof", given.results)
    write_record(path, record)
    for name, counts in tally.responses.items():
        print(name, dict(sorted(counts.items())))
    for name, fault in tally.faults.items():
        print(f"FAULT {name}: {fault}")
    print(f"{tally.cases} cases; record: {path}")
    return 0 if held else 1


async def cases(examples: int, seed: int) -> Tally:
    with (
        running(VALKEY) as store,
        tempfile.TemporaryDirectory(prefix="galley-") as folder,
        tempfile.TemporaryDirectory() as tokenizer,
    ):
        tokenizer_files.write(Path(tokenizer))
        (Path(tokenizer) / "generation_config.json").write_text(SHORT)
        async with World(Path(folder), Path(tokenizer), store.url, CREDIT) as world:
            gateway = await world.gateway_of(Parts(metrics=Registry(GATEWAY)), http_port=0)
            return await asyncio.to_thread(check, gateway.http, examples, seed)


if __name__ == "__main__":
    sys.exit(main())

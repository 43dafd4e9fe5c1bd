"""Measure what audits, canaries and swaps of draft weights cost: `make bench-living`.

Three parts, with a stack each; audits.py, canary.py and swap.py say how they measure. The goals: audits take
at most 1 % and canaries at most 0.5 % of the throughput of 16 streams, and a swap delays no stream by more
than a round. Writes bench/results/living-costs.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import MIN_PAIRS, Goal, goal_lines, result_path, write_record
from bench.living.costs.audits import measure_audits
from bench.living.costs.canary import measure_canary
from bench.living.costs.swap import measure_swap
from galley.common.models.files import shipped_draft

PARTS = AUDIT, CANARY, SWAP = "audit", "canary", "swap"
_STREAMS_OF_SWAP = (1, 2)
"""With more, two cores leave the draft too little time: its tokens miss almost all rounds, swap or not."""


def main() -> int:
    """Run the parts; missed goals are findings, not errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default: %(default)s)")
    parser.add_argument(
        "--pairs", type=int, default=8, help="pairs of audits and swaps (default: %(default)s)"
    )
    parser.add_argument(
        "--canary-pairs", type=int, default=12, help="pairs of canaries (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens an answer (default: %(default)s)")
    parser.add_argument("--swap-tokens", type=int, default=480, help="of swaps (default: %(default)s)")
    parser.add_argument(
        "--result", type=Path, default=result_path("living-costs"), help="where the record is"
    )
    given = parser.parse_args()
    parts = given.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: must be of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    if lost := kept_parts(given.result) - set(parts):
        names = ", ".join(sorted(lost))
        parser.error(f"--result: {given.result} has {names}, which --parts {given.parts} would remove")
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="galley-bench-") as folder:
        record, goals = asyncio.run(measure(given, parts, Path(folder)))
    if min(given.pairs, given.canary_pairs) < MIN_PAIRS:
        print(f"fewer than {MIN_PAIRS} pairs: these figures only show that everything runs")
    took_s = round(time.monotonic() - began_s)
    options = {name: str(value) for name, value in vars(given).items()}
    write_record(
        given.result,
        {"took_s": took_s, "options": options, **record, "goals": goals},
    )
    print(f"record: {given.result}", *goal_lines(goals), sep="\n")
    return 0


def kept_parts(record: Path) -> set[str]:
    """Return the parts of an earlier record."""
    return set(PARTS) & json.loads(record.read_text(encoding="utf-8")).keys() if record.exists() else set()


async def measure(
    given: argparse.Namespace, parts: Sequence[str], folder: Path
) -> tuple[dict[str, Any], list[Goal]]:
    """Run the parts one after another; return their records and goals."""
    draft = shipped_draft("")
    if draft is None:
        raise SystemExit("the default model's draft is not installed")
    record: dict[str, Any] = {}
    goals: list[Goal] = []
    if AUDIT in parts:
        audits = await measure_audits(folder, given.pairs, given.max_tokens)
        record[AUDIT] = {"compared": audits.compared(), "share": audits.share, "measured": audits}
        print(f"audits and compared tokens by the end of each part: {dict(audits.audited)}")
        goals += audits.goals()
    if CANARY in parts:
        canary = await measure_canary(folder, Path(draft), given.canary_pairs, given.max_tokens)
        record[CANARY] = {"compared": canary.compared(), "measured": canary}
        print(f"sessions that counted, and those of the canary: {dict(canary.sessions)}")
        goals += canary.goals()
    if SWAP in parts:
        tokens_of = dict.fromkeys(_STREAMS_OF_SWAP, given.swap_tokens)
        swap = await measure_swap(folder, Path(draft), given.pairs, tokens_of)
        record[SWAP] = {"measured": swap}
        goals += swap.goals()
    return record, goals


if __name__ == "__main__":
    sys.exit(main())

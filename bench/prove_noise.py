"""Prove that no noise is infinite or NaN: `make prove-noise`, the long form of a bounded test of the suite.

Draws 10**8 words over many seeds and positions and checks the noise of each, and of a million words at each
end of the range. Writes the counts to bench/results/noise.json; exits 1 unless all are finite, within
their bounds and checked in time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np

from bench.harness import result_path, write_record
from galley.core.noise import GUMBEL_MAX, GUMBEL_MIN, LANES, block_words, gumbel

CHUNK = 2**18  # words a draw: a vocabulary's worth, several times over
ENDS = 2**20  # words at each end of the range
SEEDS = (*(2**64 * i // 7 for i in range(7)), 1, 2**32, 2**64 - 1)


@dataclass(frozen=True, slots=True)
class Found:
    """The noise of a set of words: its range, and what is not finite."""

    words: int
    not_finite: int
    beyond_bounds: int
    smallest: float
    largest: float
    mean: float

    def ok(self) -> bool:
        """Return True if all noise is finite and within its bounds."""
        return self.not_finite == 0 and self.beyond_bounds == 0


def main() -> int:
    """Run the proof; return 0 if all noise is finite and within its bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=10**8, help="words to draw (default: %(default)s)")
    parser.add_argument(
        "--limit-s", type=float, default=600.0, help="time limit in seconds (default: %(default)s)"
    )
    arguments = parser.parse_args()
    began = time.monotonic()
    drawn = draw(arguments.words, began + arguments.limit_s)
    ends = check(np.concatenate((np.arange(ENDS), 2**32 - ENDS + np.arange(ENDS))).astype(np.uint32))
    report = {
        "seeds": list(SEEDS),
        "positions_from": 0,
        "asked": arguments.words,
        "drawn": asdict(drawn),
        "ends_of_the_range": asdict(ends),
        "bounds": [GUMBEL_MIN, GUMBEL_MAX],
        "seconds": round(time.monotonic() - began, 1),
        "ok": drawn.ok() and ends.ok() and drawn.words >= arguments.words,
    }
    write_record(result_path("noise"), report)
    print(json.dumps(report, indent=2))
    return 0 if report["ok"] else 1


def draw(count: int, until_s: float) -> Found:
    """Check the noise of at least `count` words, by position and all seeds; stop at `until_s` (monotonic)."""
    parts: list[Found] = []
    blocks = np.arange(CHUNK // LANES)
    while sum(part.words for part in parts) < count and time.monotonic() < until_s:
        seed, position = SEEDS[len(parts) % len(SEEDS)], len(parts) // len(SEEDS)
        parts.append(check(block_words(seed, position, blocks).ravel()))
    return Found(
        words=sum(part.words for part in parts),
        not_finite=sum(part.not_finite for part in parts),
        beyond_bounds=sum(part.beyond_bounds for part in parts),
        smallest=min(part.smallest for part in parts),
        largest=max(part.largest for part in parts),
        mean=float(np.mean([part.mean for part in parts])),
    )


def check(words: np.ndarray[tuple[int, ...], np.dtype[np.uint32]]) -> Found:
    """Return the range of the noise of these words, and the number of violations."""
    noise = gumbel(words)
    slack = 1e-9  # the bounds come from another library's logarithm
    beyond = (noise < GUMBEL_MIN - slack) | (noise > GUMBEL_MAX + slack)
    return Found(
        words=noise.size,
        not_finite=int(np.count_nonzero(~np.isfinite(noise))),
        beyond_bounds=int(np.count_nonzero(beyond)),
        smallest=float(noise.min()),
        largest=float(noise.max()),
        mean=float(noise.mean()),
    )


if __name__ == "__main__":
    sys.exit(main())

"""Made-up sessions of a version, from a seed."""

from __future__ import annotations

import random
from functools import reduce
from operator import add

from galley.core.versions.counts import VersionCounts, session_counts


def sessions(
    chance: random.Random,
    number: int,
    *,
    gain: float = 0.5,
    spread: float = 0.1,
    speed_up: float = 1.5,
    failures: float = 0.0,
) -> VersionCounts:
    """Return the counts of `number` sessions of about 100 tokens, whose gains spread about `gain`."""
    return reduce(
        add, (_session(chance, gain, spread, speed_up, failures) for _ in range(number)), VersionCounts()
    )


def _session(
    chance: random.Random, gain: float, spread: float, speed_up: float, failures: float
) -> VersionCounts:
    tokens = chance.randint(20, 180)
    share = min(1.0, max(0.0, chance.gauss(gain, spread)))
    taken = tokens * 10_000_000
    failed = sum(chance.random() < failures for _ in range(20))
    return session_counts(
        output_tokens=tokens,
        accepted=round(share * tokens),
        proposals=20 - failed,
        failures=failed,
        round_ns=taken,
        plain_ns=round(taken * chance.gauss(speed_up, 0.1)),
        draft_compute_ns=tokens * 1_000_000,
    )

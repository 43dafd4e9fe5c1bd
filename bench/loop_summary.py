"""From the blocks of a closed loop to its rows. No I/O."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from galley.bench.closed_loop import LoopBlock, speed_of
from galley.bench.stats import Interval, percentile, ratio_interval

MS = 1e3


@dataclass(frozen=True, slots=True)
class LoopRow:
    """How fast an arm answered so many streams at one temperature, and how often as fast as the baseline."""

    streams: int
    temperature: float
    arm: str
    tokens_per_s: float
    ratio: Interval | None
    cpu_ms_per_token: float
    first_token_ms: tuple[float, float]
    inter_token_ms: tuple[float, float]
    share_cut: float


def loop_rows(blocks: Sequence[LoopBlock], baseline: str) -> list[LoopRow]:
    """One row for each number of streams, temperature and arm, in the order in which they first come."""
    groups: dict[tuple[int, float], dict[str, list[LoopBlock]]] = defaultdict(lambda: defaultdict(list))
    for block in sorted(blocks, key=lambda block: block.load.pair):
        groups[block.load.streams, block.load.temperature][block.load.arm].append(block)
    return [
        _row(mine, by_arm.get(baseline, []))
        for _, by_arm in sorted(groups.items())
        for _, mine in sorted(by_arm.items())
    ]


def _row(mine: Sequence[LoopBlock], base: Sequence[LoopBlock]) -> LoopRow:
    load = mine[0].load
    first = [seconds for block in mine for seconds in block.first_token_s]
    between = [seconds for block in mine for seconds in block.inter_token_s]
    given = sum(block.given for block in mine)
    return LoopRow(
        streams=load.streams,
        temperature=load.temperature,
        arm=load.arm,
        tokens_per_s=speed_of(mine),
        ratio=speed_ratio(mine, base) if len(base) == len(mine) else None,
        cpu_ms_per_token=MS * sum(block.cpu_s for block in mine) / max(1, given),
        first_token_ms=_ends(first),
        inter_token_ms=_ends(between),
        share_cut=1 - sum(block.tokens for block in mine) / max(1, given),
    )


def speed_ratio(mine: Sequence[LoopBlock], base: Sequence[LoopBlock]) -> Interval:
    """The median of the pairs' ratios of tokens per second."""
    return ratio_interval([b.tokens_per_s for b in mine], [b.tokens_per_s for b in base])


def of_arm(blocks: Sequence[LoopBlock], arm: str, streams: int, temperature: float) -> list[LoopBlock]:
    """An arm's blocks at one number of streams and one temperature, pair by pair."""
    found = [
        block
        for block in blocks
        if (block.load.arm, block.load.streams, block.load.temperature) == (arm, streams, temperature)
    ]
    return sorted(found, key=lambda block: block.load.pair)


def _ends(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile in milliseconds."""
    if not seconds:
        return (0.0, 0.0)
    return (MS * percentile(seconds, 50), MS * percentile(seconds, 99))

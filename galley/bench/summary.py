"""Summarize the blocks of closed loops: speed, acceptance, waste."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from statistics import fmean
from typing import Any

from galley.bench.answers import Rounds
from galley.bench.closed_loop import LoopBlock, speed_of
from galley.bench.stats import Interval, median_interval, percentile

MS = 1e3
PERCENTS = (50, 90, 99)


def speculated(blocks: Iterable[LoopBlock]) -> Rounds:
    """Return the sums over all answers of `blocks`."""
    counts = [a.rounds for block in blocks for a in block.answers if a.rounds is not None]
    names = [field.name for field in fields(Rounds)]
    return Rounds(**{name: _sum([getattr(one, name) for one in counts]) for name in names if counts})


def _sum(counts: Sequence[Any]) -> Any:
    if isinstance(counts[0], tuple):
        return tuple(sum(at) for at in zip_longest(*counts, fillvalue=0))
    return sum(counts)


@dataclass(frozen=True, slots=True)
class Row:
    """The speed of one arm on one workload, at one number of streams and one temperature.

    `ratio` is against the baseline; times are the 50th, 90th and 99th percentiles in milliseconds.
    """

    workload: str
    streams: int
    temperature: float
    arm: str
    tokens_per_s: float
    ratio: Interval | None
    first_token_ms: tuple[float, ...]
    inter_token_ms: tuple[float, ...]
    cpu_ms_per_token: float
    share_cut: float
    speculated: Rounds


def rows_of(blocks: Sequence[LoopBlock], baseline: str) -> list[Row]:
    """Return a row for each workload, number of streams, temperature and arm, in order of appearance."""
    groups: dict[tuple[str, int, float], dict[str, list[LoopBlock]]] = defaultdict(lambda: defaultdict(list))
    for block in sorted(blocks, key=lambda block: block.load.pair):
        load = block.load
        groups[load.workload, load.streams, load.temperature][load.arm].append(block)
    return [
        _row(mine, by_arm.get(baseline, []))
        for by_arm in groups.values()
        for _, mine in sorted(by_arm.items(), key=lambda item: item[0] != baseline)
    ]


def _row(mine: Sequence[LoopBlock], base: Sequence[LoopBlock]) -> Row:
    load = mine[0].load
    tokens, given = sum(block.tokens for block in mine), sum(block.given for block in mine)
    return Row(
        workload=load.workload,
        streams=load.streams,
        temperature=load.temperature,
        arm=load.arm,
        tokens_per_s=speed_of(mine),
        ratio=speed_ratio(mine, base),
        first_token_ms=_percentiles([s for block in mine for s in block.first_token_s]),
        inter_token_ms=_percentiles([s for block in mine for s in block.inter_token_s]),
        cpu_ms_per_token=MS * sum(block.cpu_s for block in mine) / max(1, given),
        share_cut=1 - tokens / given if given else 0.0,
        speculated=speculated(mine),
    )


def speed_ratio(mine: Sequence[LoopBlock], base: Sequence[LoopBlock]) -> Interval | None:
    """Return the median of the pairs' ratios of tokens per second; None if no pair can be compared."""
    ratios = _ratios(mine, base)
    return median_interval(list(ratios.values())) if ratios else None


def mean_ratio(
    blocks: Sequence[LoopBlock], arm: str, baseline: str, streams: int, temperature: float | None = None
) -> Interval | None:
    """Return the median over the pairs of their mean ratio over workloads and temperatures.

    Pairs that lack a comparable workload are left out; None if none is left.
    """
    kinds: dict[tuple[str, float], list[LoopBlock]] = defaultdict(list)
    for block in blocks:
        load = block.load
        if load.streams == streams and temperature in {None, load.temperature}:
            kinds[load.workload, load.temperature].append(block)
    by_kind = [
        _ratios([b for b in of if b.load.arm == arm], [b for b in of if b.load.arm == baseline])
        for of in kinds.values()
    ]
    shared = set.intersection(*(set(ratios) for ratios in by_kind)) if by_kind else set()
    means = [fmean(ratios[pair] for ratios in by_kind) for pair in sorted(shared)]
    return median_interval(means) if means else None


def _ratios(mine: Sequence[LoopBlock], base: Sequence[LoopBlock]) -> dict[int, float]:
    of_base = {block.load.pair: block.tokens_per_s for block in base}
    return {
        block.load.pair: block.tokens_per_s / of_base[block.load.pair]
        for block in mine
        if of_base.get(block.load.pair)
    }


def _percentiles(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(MS * percentile(seconds, percent) if seconds else 0.0 for percent in PERCENTS)

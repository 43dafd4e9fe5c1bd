"""Summarize closed loops: medians and their intervals, speed, acceptance, waste, predicted speed-up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise, zip_longest
from statistics import fmean
from typing import Any

import numpy as np

from galley.bench.answers import Rounds
from galley.bench.closed_loop import LoopBlock, speed_of
from galley.core.cost.model import StepTimes, best_k
from galley.core.session.round import sum_sources

RESAMPLES = 10_000
CONFIDENCE = 0.95
MS = 1e3
PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Interval:
    """The median of `count` values, and its 95 % bootstrap interval [low, high]."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return self.text()

    def text(self, digits: int = 2) -> str:
        """Return median and interval, with so many digits after the point."""
        return f"{self.median:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def median_interval(values: Sequence[float], seed: int = 0) -> Interval:
    """Return the median and its percentile bootstrap interval (Efron 1979). Raises ValueError if empty."""
    if not values:
        raise ValueError("values: must not be empty")
    given = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(given), (RESAMPLES, len(given)))
    medians = np.median(given[picks], axis=1)  # [resamples]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return Interval(float(np.median(given)), float(low), float(high), len(given))


def ratio_interval(ours: Sequence[float], base: Sequence[float], seed: int = 0) -> Interval:
    """Return the median of ours[i] / base[i]; pairs with a base of 0 are left out. Raises ValueError."""
    return median_interval([a / b for a, b in zip(ours, base, strict=True) if b], seed)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated between the nearest two values. Raises ValueError if empty."""
    if not values:
        raise ValueError("values: must not be empty")
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent))


def speculated(blocks: Iterable[LoopBlock]) -> Rounds:
    counts = [a.rounds for block in blocks for a in block.answers if a.rounds is not None]
    names = [field.name for field in fields(Rounds) if field.name != "sources"]
    sums = {name: _sum([getattr(one, name) for one in counts]) for name in names if counts}
    return Rounds(**sums, sources=tuple(sum_sources(of for one in counts for of in one.sources).values()))


def _sum(counts: Sequence[Any]) -> Any:
    if isinstance(counts[0], tuple):
        return tuple(sum(at) for at in zip_longest(*counts, fillvalue=0))
    return sum(counts)


@dataclass(frozen=True, slots=True)
class Row:
    """The speed of one arm on one workload, at one number of streams and one temperature.

    `ratio` is against the baseline. So is `whole_ratio`, of all tokens from the first request until the last
    answer, when fewer streams run. Times are the 50th, 90th and 99th percentiles in ms. Tokens of one
    message are 0 ms apart.
    """

    workload: str
    streams: int
    temperature: float
    arm: str
    tokens_per_s: float
    ratio: Interval | None
    whole_ratio: Interval | None
    first_token_ms: tuple[float, ...]
    inter_token_ms: tuple[float, ...]
    cpu_ms_per_token: float
    share_cut: float
    speculated: Rounds


def rows_of(blocks: Sequence[LoopBlock], baseline: str) -> list[Row]:
    """Return a row for each workload, number of streams, temperature and arm; `baseline` comes first."""
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
    times = [answer.at_s for block in mine for answer in block.answers if answer.at_s]
    tokens, given = sum(block.tokens for block in mine), sum(block.given for block in mine)
    return Row(
        workload=load.workload,
        streams=load.streams,
        temperature=load.temperature,
        arm=load.arm,
        tokens_per_s=speed_of(mine),
        ratio=speed_ratio(mine, base),
        whole_ratio=_interval(_ratios(mine, base, lambda block: block.whole_tokens_per_s)),
        first_token_ms=_percentiles([at_s[0] for at_s in times]),
        inter_token_ms=_percentiles([after - before for at_s in times for before, after in pairwise(at_s)]),
        cpu_ms_per_token=MS * sum(block.cpu_s for block in mine) / max(1, given),
        share_cut=1 - tokens / given if given else 0.0,
        speculated=speculated(mine),
    )


def speed_ratio(mine: Sequence[LoopBlock], base: Sequence[LoopBlock]) -> Interval | None:
    """Return the median of the pairs' ratios of tokens per second; None if no pair can be compared."""
    return _interval(_ratios(mine, base))


def _interval(ratios: Mapping[int, float]) -> Interval | None:
    return median_interval(list(ratios.values())) if ratios else None


def mean_ratio(
    blocks: Sequence[LoopBlock], arm: str, baseline: str, streams: int, temperature: float | None = None
) -> Interval | None:
    """Return the median over pairs of the mean ratio over workloads and temperatures; None without pairs."""
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


def _ratios(
    mine: Sequence[LoopBlock],
    base: Sequence[LoopBlock],
    speed: Callable[[LoopBlock], float] = lambda block: block.tokens_per_s,
) -> dict[int, float]:
    of_base = {block.load.pair: speed(block) for block in base}
    return {
        block.load.pair: speed(block) / of_base[block.load.pair]
        for block in mine
        if of_base.get(block.load.pair)
    }


def _percentiles(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(MS * percentile(seconds, percent) if seconds else 0.0 for percent in PERCENTS)


# The cost model (galley/core/cost/model.py) beside a measured run. It knows the target's steps, as timed in
# this run, the draft's compute time and the acceptance, and not queues, network, prefill and overlap. A
# measured speed-up below the prediction is lost to orchestration or a busy host; one above it had drafting
# overlap with the target.


def pass_times(blocks: Sequence[LoopBlock]) -> StepTimes | None:
    """Return step times by rows: one and the verified draft tokens for each stream; None without rounds."""
    groups: dict[tuple[int, str], list[LoopBlock]] = defaultdict(list)
    for block in blocks:
        groups[block.load.streams, block.load.arm].append(block)
    measured: dict[int, list[int]] = defaultdict(list)
    for (streams, _), mine in groups.items():
        of = speculated(mine)
        if of.rounds and of.target_compute_ns:
            measured[_rows(of, streams)].append(of.target_compute_ns // of.rounds)
    if not measured:
        return None
    points = [(rows, sum(took) // len(took)) for rows, took in sorted(measured.items())]
    # A step smaller than any measured is taken to cost as much as the smallest.
    return StepTimes.measured(points if points[0][0] == 1 else [(1, points[0][1]), *points])


def predicted_gain(of: Rounds, streams: int, times: StepTimes) -> float:
    """Return the predicted speed of these rounds relative to plain decoding; 1 if nothing was verified.

    Leviathan, Kalman, Matias, arXiv 2211.17192, section 3.3, with measured instead of constant steps.
    """
    if not of.verified:
        return 1.0
    draft_ns = of.draft_compute_ns / of.rounds
    return of.tokens_per_round * times(streams) / (times(_rows(of, streams)) + draft_ns)


def predicted_best_k(of: Rounds, streams: int, times: StepTimes, max_k: int) -> int | None:
    """Return the k of the highest predicted gain for this acceptance rate of first draft tokens, or None.

    The model knows chains alone.
    """
    if of.has_trees or not (of.verified_at and of.verified_at[0] and of.proposed):
        return None
    alpha = of.accepted_at[0] / of.verified_at[0] if of.accepted_at else 0.0
    step_ns = of.draft_compute_ns / of.proposed
    ratio = times(streams) / step_ns if step_ns else math.inf
    return best_k(alpha, ratio, times.curve, streams, max_k)


def _rows(of: Rounds, streams: int) -> int:
    return round(streams * (1 + of.verified / of.rounds))

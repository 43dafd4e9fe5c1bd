"""Summarize the blocks of closed loops: speed, acceptance, waste."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean

from galley.bench.closed_loop import LoopBlock, speed_of
from galley.bench.stats import Interval, median_interval, percentile

MS = 1e3
PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Speculated:
    """The gateway's counts of the rounds of some answers, summed; times in nanoseconds.

    The draft `proposed` tokens, of which `drafted` were sent to the target; `cancelled` proposals were given
    up. `accepted_at[i]` counts the rounds in which draft token i was accepted, `verified_at[i]` those in
    which it was verified. `exposed_draft_ns` is the time in which the target waited for the draft.
    """

    rounds: int = 0
    proposed: int = 0
    cancelled: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    verified_at: tuple[int, ...] = ()
    round_ns: int = 0
    exposed_draft_ns: int = 0
    draft_compute_ns: int = 0
    target_compute_ns: int = 0

    @property
    def tokens_per_round(self) -> float:
        """1 + accepted / rounds, the mean accepted length; 0 without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def by_position(self) -> tuple[float, ...]:
        """The share of verified draft tokens that was accepted, by position."""
        pairs = zip_longest(self.accepted_at, self.verified_at, fillvalue=0)
        return tuple(accepted / verified for accepted, verified in pairs if verified)

    @property
    def exposed_share(self) -> float:
        """The exposed draft time as a share of the rounds' time."""
        return self.exposed_draft_ns / self.round_ns if self.round_ns else 0.0

    @property
    def wasted_draft(self) -> int:
        """The proposed tokens that were not accepted, sent to the target or not."""
        return self.proposed - self.accepted

    @property
    def wasted_verify(self) -> int:
        """The verified draft tokens that were not accepted."""
        return self.verified - self.accepted


def speculated(blocks: Iterable[LoopBlock]) -> Speculated:
    """Return the sums over all answers of `blocks`."""
    counts = [a.rounds for block in blocks for a in block.answers if a.rounds is not None]
    return Speculated(
        rounds=sum(c.rounds for c in counts),
        proposed=sum(c.proposed for c in counts),
        cancelled=sum(c.cancelled for c in counts),
        drafted=sum(c.drafted for c in counts),
        verified=sum(c.verified for c in counts),
        accepted=sum(c.accepted for c in counts),
        accepted_at=_sums(c.accepted_at for c in counts),
        verified_at=_sums(c.verified_at for c in counts),
        round_ns=sum(c.round_ns for c in counts),
        exposed_draft_ns=sum(c.exposed_draft_ns for c in counts),
        draft_compute_ns=sum(c.draft_compute_ns for c in counts),
        target_compute_ns=sum(c.target_compute_ns for c in counts),
    )


def _sums(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(at) for at in zip_longest(*counts, fillvalue=0))


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
    speculated: Speculated


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

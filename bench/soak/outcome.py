"""Compute load, pace and overload from the outcome of a soak, without I/O; times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.soak.clients import Arrival, Heard
from bench.soak.leaks import Left
from galley.bench.summary import Interval, percentile, ratio_interval

if TYPE_CHECKING:
    from bench.soak.memory import Sample

LONGEST_GAP_S = 10.0
LONGEST_WAIT_S = 30.0
LEAST_BACK = 0.95
_SETTLE_SHARE = 0.2
"""Share of a block that is left out at its beginning, where the block before may still have effects."""
_BACK_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time, in monotonic seconds."""

    first_s: float
    last_s: float

    @property
    def seconds(self) -> float:
        """Return the length in seconds."""
        return self.last_s - self.first_s

    def holds(self, at_s: float) -> bool:
        """Return True if the time is within the span."""
        return self.first_s <= at_s < self.last_s


@dataclass(frozen=True, slots=True)
class Probe:
    """The worst that happened with `streams` streams for a while."""

    streams: int
    refused: int
    failed: int
    wrong: int
    longest_gap_s: float
    longest_wait_s: float
    least_blocks_free: int
    tokens_per_s: float

    @property
    def holds(self) -> bool:
        """Return True if nothing was refused, failed, wrong, silent for long or preempted.

        A session is preempted only when the target has no free block.
        """
        quiet_s = self.longest_gap_s <= LONGEST_GAP_S and self.longest_wait_s <= LONGEST_WAIT_S
        return not (self.refused or self.failed or self.wrong) and quiet_s and self.least_blocks_free > 0


def probe_of(streams: int, heard: Heard, samples: Sequence[Sample], span: Span) -> Probe:
    """Sum up what the clients of a probe received."""
    gaps = [arrival.gap_s for arrival in heard.arrivals if arrival.gap_s is not None]
    return Probe(
        streams,
        refused=len(heard.refusals),
        failed=len(heard.failures),
        wrong=len(heard.wrong),
        longest_gap_s=max(gaps, default=0.0),
        longest_wait_s=max(heard.waits_s, default=0.0),
        least_blocks_free=min((sample.blocks_free for sample in samples), default=0),
        tokens_per_s=rate(heard.arrivals, span),
    )


@dataclass(frozen=True, slots=True)
class Block:
    """One block of the soak; a pair has one with slow readers and one with ordinary clients instead."""

    pair: int
    misread: bool
    span: Span


@dataclass(frozen=True, slots=True)
class Overload:
    """The overload: spans before, during and after it, and by how much this process's event loop was late."""

    before: Span
    during: Span
    after: Span
    ordinary: Heard
    extra: Heard
    lag_s: Sequence[float]


@dataclass(slots=True)
class Outcome:
    """Everything that a soak measured."""

    probes: list[Probe] = field(default_factory=list)
    streams: int = 0
    heard: Heard | None = None
    soaked: Span = Span(0.0, 0.0)
    blocks: list[Block] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    overload: Overload | None = None
    left: Left | None = None
    facts: Mapping[str, object] = field(default_factory=dict)


def rate(arrivals: Sequence[Arrival], span: Span) -> float:
    """Return the tokens per second in a span."""
    return sum(arrival.tokens for arrival in arrivals if span.holds(arrival.at_s)) / span.seconds


def pace_s(arrivals: Sequence[Arrival]) -> float:
    """Return the mean time of one token after an answer's first."""
    return sum(one.gap_s or 0.0 for one in arrivals) / sum(one.tokens for one in arrivals)


def p99_gap_s(arrivals: Sequence[Arrival]) -> float:
    """Return the 99th percentile of gaps between arrivals of one stream."""
    return percentile([one.gap_s or 0.0 for one in arrivals], 99)


def judged(arrivals: Sequence[Arrival], block: Block) -> list[Arrival]:
    """Return the arrivals of counted clients in a block, without the first of each answer."""
    span = Span(block.span.first_s + _SETTLE_SHARE * block.span.seconds, block.span.last_s)
    return [one for one in arrivals if one.counted and one.gap_s is not None and span.holds(one.at_s)]


def harm(heard: Heard, blocks: Sequence[Block]) -> tuple[Interval, Interval]:
    """Return what misreaders cost others, as ratios with over without them: time a token, and p99 gap."""
    of = {(block.pair, block.misread): judged(heard.arrivals, block) for block in blocks}
    pairs = sorted({block.pair for block in blocks})
    having, without = ([of[pair, misread] for pair in pairs] for misread in (True, False))

    def ratio(figure: Callable[[Sequence[Arrival]], float]) -> Interval:
        return ratio_interval([figure(block) for block in having], [figure(block) for block in without])

    return ratio(pace_s), ratio(p99_gap_s)


def back_after_s(overload: Overload) -> float | None:
    """Return the seconds until the next half minute reaches LEAST_BACK of the rate before; None: never."""
    arrivals = [*overload.ordinary.arrivals, *overload.extra.arrivals]
    required = LEAST_BACK * rate(arrivals, overload.before)
    after, end_s = 0, overload.during.last_s
    while end_s + after + _BACK_WINDOW_S <= overload.after.last_s:
        if rate(arrivals, Span(end_s + after, end_s + after + _BACK_WINDOW_S)) >= required:
            return float(after)
        after += 1
    return None

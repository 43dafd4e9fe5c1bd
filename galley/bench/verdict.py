"""Judge whether speculation pays: by the interval of its speed-up, at each load and for each workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from galley.bench.closed_loop import LoopBlock
from galley.bench.summary import Interval, mean_ratio

# The bootstrap interval of one or two pairs says nothing.
MIN_PAIRS = 3
PAYS, LOSES, OPEN = "pays", "does not pay", "undecided"


@dataclass(frozen=True, slots=True)
class Gain:
    """The speed-up of one arm at one number of streams; `workload` is empty for the mean of all workloads."""

    workload: str
    streams: int
    arm: str
    ratio: Interval

    @property
    def is_clear(self) -> bool:
        return self.ratio.count >= MIN_PAIRS

    @property
    def verdict(self) -> Literal["pays", "does not pay", "undecided"]:
        """Return "undecided" if the interval includes plain decoding's speed, or for too few pairs."""
        if not self.is_clear or self.ratio.low <= 1.0 < self.ratio.high:
            return "undecided"
        return "pays" if self.ratio.low > 1.0 else "does not pay"

    def __str__(self) -> str:
        ratio = self.ratio
        return f"{self.arm} {ratio.median:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}] at {_streams(self)}"


def gains_of(blocks: Sequence[LoopBlock], baseline: str) -> list[Gain]:
    """Return the gains over `baseline` of every arm, at every load: those of the mean first."""
    arms = list(dict.fromkeys(block.load.arm for block in blocks if block.load.arm != baseline))
    workloads = list(dict.fromkeys(block.load.workload for block in blocks))
    gains = []
    for workload in ("", *workloads) if len(workloads) > 1 else workloads:
        mine = [block for block in blocks if workload in {"", block.load.workload}]
        for streams in sorted({block.load.streams for block in mine}):
            for arm in arms:
                ratio = mean_ratio(mine, arm, baseline, streams)
                if ratio is not None:
                    gains.append(Gain(workload, streams, arm, ratio))
    return gains


def of_mean(gains: Sequence[Gain]) -> list[Gain]:
    """Return the gains in the mean over the workloads; those of the only workload if there is one."""
    means = [gain for gain in gains if not gain.workload]
    return means or list(gains)


def best_by_load(gains: Sequence[Gain]) -> list[Gain]:
    """Return the fastest arm at each number of streams, in rising order."""
    best: dict[int, Gain] = {}
    for gain in gains:
        known = best.get(gain.streams)
        if known is None or (gain.is_clear, gain.ratio.median) > (known.is_clear, known.ratio.median):
            best[gain.streams] = gain
    return [best[streams] for streams in sorted(best)]


def sentence(gains: Sequence[Gain], pair: str) -> str:
    """Say whether speculation pays for `pair` ("the model and its draft") at each load, with intervals."""
    if not gains:
        return f"Whether speculation pays for {pair} is unknown: nothing was measured."
    paying, losing, undecided = (
        [gain for gain in gains if gain.verdict == verdict] for verdict in (PAYS, LOSES, OPEN)
    )
    parts = []
    if paying:
        parts.append(f"Speculation pays for {pair} {_where(paying, gains)} ({_listed(paying)}).")
        if losing:
            parts.append(f"It does not pay at {_numbers(losing)} ({_listed(losing)}).")
    elif losing:
        where = "at any load measured" if not undecided else f"at {_numbers(losing)}"
        parts.append(f"Speculation does not pay for {pair} {where} ({_listed(losing)}).")
    if undecided:
        what = f"Whether speculation pays for {pair} is undecided" if not parts else "Undecided"
        reason = "more --repeats narrow the interval"
        if not all(gain.is_clear for gain in undecided):
            reason = f"it takes at least --repeats {MIN_PAIRS}"
        parts.append(f"{what} at {_numbers(undecided)} ({_listed(undecided)}): {reason}.")
    return " ".join(parts)


def _where(paying: Sequence[Gain], gains: Sequence[Gain]) -> str:
    if len(paying) == len(gains):
        return f"at every load measured, up to {_streams(paying[-1])}"
    if list(paying) == list(gains[: len(paying)]):
        return f"up to {_streams(paying[-1])}"
    return f"at {_numbers(paying)} only"


def _numbers(gains: Sequence[Gain]) -> str:
    last = _streams(gains[-1])
    others = ", ".join(str(gain.streams) for gain in gains[:-1])
    return f"{others} and {last}" if others else last


def _streams(gain: Gain) -> str:
    return "1 stream" if gain.streams == 1 else f"{gain.streams} streams"


def _listed(gains: Sequence[Gain]) -> str:
    return ", ".join(map(str, gains))

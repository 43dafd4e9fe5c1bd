"""Predict the speed-up of a measured run by the cost model (galley/core/cost/model.py).

The model knows the target's steps, as timed in this run, the draft's compute time and the acceptance. It does
not know queues, network, prefill and overlap. A measured speed-up below the prediction is lost to
orchestration or a busy host; one above it had drafting overlap with the target.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from galley.bench.answers import Rounds
from galley.bench.closed_loop import LoopBlock
from galley.bench.summary import speculated
from galley.core.cost.model import StepTimes, best_k


def pass_times(blocks: Sequence[LoopBlock]) -> StepTimes | None:
    """Return the time of the target's steps by rows, from the rounds of these blocks; None without rounds.

    The rows of a round are one token and the verified draft tokens of each stream.
    """
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

    It is tokens a round x plain step / (draft compute + verifying step): Leviathan, Kalman, Matias, arXiv
    2211.17192, section 3.3, with measured steps in place of constant ones.
    """
    if not of.verified:
        return 1.0
    draft_ns = of.draft_compute_ns / of.rounds
    return of.tokens_per_round * times(streams) / (times(_rows(of, streams)) + draft_ns)


def predicted_best_k(of: Rounds, streams: int, times: StepTimes, max_k: int) -> int | None:
    """Return the k of the highest predicted gain for this acceptance rate of first draft tokens, or None."""
    if not (of.verified_at and of.verified_at[0] and of.proposed):
        return None
    alpha = of.accepted_at[0] / of.verified_at[0] if of.accepted_at else 0.0
    step_ns = of.draft_compute_ns / of.proposed
    ratio = times(streams) / step_ns if step_ns else math.inf
    return best_k(alpha, ratio, times.curve, streams, max_k)


def _rows(of: Rounds, streams: int) -> int:
    return round(streams * (1 + of.verified / of.rounds))

"""What the cost model (galley/core/cost/model.py) says of a measured run, beside what it came to.

The model knows the target's passes (as the target timed them in this very run), the draft's computing and the
acceptance; it knows nothing of queues, hops, prefill or of what overlaps. Where a measured speed-up falls
short of it, orchestration or a busy host took the rest; where it is above, drafting was hidden.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from galley.bench.closed_loop import LoopBlock
from galley.bench.summary import Speculated, speculated
from galley.core.cost.model import StepTimes, best_k


def pass_times(blocks: Sequence[LoopBlock]) -> StepTimes | None:
    """What the target's passes took by their rows, from the rounds of these blocks; None without any.

    The rows of a round are the streams, each with one token and its verified draft tokens.
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
    # Where no load has so few rows, a smaller pass is taken to cost as much as the smallest seen.
    return StepTimes.measured(points if points[0][0] == 1 else [(1, points[0][1]), *points])


def predicted_gain(of: Speculated, streams: int, times: StepTimes) -> float:
    """How many times as fast as plain decoding these rounds should have been; 1 where nothing was verified.

    Tokens a round times the plain pass, over the round: the draft's computing, then the verifying pass
    (Leviathan, Kalman, Matias, arXiv 2211.17192, section 3.3, with measured passes for their constant ones).
    """
    if not of.verified:
        return 1.0
    draft_ns = of.draft_compute_ns / of.rounds
    return of.tokens_per_round * times(streams) / (times(_rows(of, streams)) + draft_ns)


def predicted_best_k(of: Speculated, streams: int, times: StepTimes, max_k: int) -> int | None:
    """The k at which the model's gain peaks for this acceptance of the first draft token; None if unknown."""
    if not (of.verified_at and of.verified_at[0] and of.proposed):
        return None
    alpha = of.accepted_at[0] / of.verified_at[0] if of.accepted_at else 0.0
    step_ns = of.draft_compute_ns / of.proposed
    ratio = times(streams) / step_ns if step_ns else math.inf
    return best_k(alpha, ratio, times.curve, streams, max_k)


def _rows(of: Speculated, streams: int) -> int:
    return round(streams * (1 + of.verified / of.rounds))

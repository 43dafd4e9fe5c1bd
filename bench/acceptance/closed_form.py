"""Compute the acceptance rate of a draft that shares the target's noise, and the best possible rate.

Draft and target that add the same Gumbel noise to their logits sample the same token with probability

    sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i)

(Daliri, Musco, Suresh, arXiv 2408.07978); the optimal coupling, which would need to know both distributions,
reaches 1 - TV(p, q). The chance that the target's token is among the first m candidates of the draft has no
sum as short. It is estimated from the same distributions and noise of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_NORMAL_95 = 1.959964
# Draws of noise for each position, and the least probability that a token has for either to be drawn for.
DRAWS = 64
_LEAST = 1e-8


def match_chance(target_probs: Floats, draft_probs: Floats) -> float:
    """Return the closed form for distributions [vocab], in O(V log V).

    max(p_j / p_i, q_j / q_i) is the first where p_j / q_j >= p_i / q_i: in the order of these ratios the
    inner sum is a part of p from the end and a part of q from the start. Tokens of probability 0 in either
    add nothing to the outer sum.
    """
    p, q = target_probs / target_probs.sum(), draft_probs / draft_probs.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(q > 0, p / q, np.where(p > 0, np.inf, 0.0))
    order = np.argsort(ratio, kind="stable")
    p, q = p[order], q[order]
    p_from = np.cumsum(p[::-1])[::-1]  # [vocab]: of this token and those after it
    q_before = np.cumsum(q) - q  # [vocab]: of those before it
    both = (p > 0) & (q > 0)
    inner = p_from[both] / p[both] + q_before[both] / q[both]
    return float(np.sum(1.0 / inner))


def optimal_chance(target_probs: Floats, draft_probs: Floats) -> float:
    """Return 1 - TV: how often the best coupling of the distributions [vocab] samples the same token."""
    p, q = target_probs / target_probs.sum(), draft_probs / draft_probs.sum()
    return float(np.minimum(p, q).sum())


def list_chances(
    target_probs: Floats, draft_probs: Floats, most: int, rng: np.random.Generator, draws: int = DRAWS
) -> Floats:
    """Estimate [most]: how often the target's token is among the draft's first 1, 2, ..., `most` candidates.

    The maximum of log p + g is the minimum of E / p with exponential E = exp(-g), the same for both.
    """
    some = np.flatnonzero(np.maximum(target_probs, draft_probs) > _LEAST)
    waits = rng.standard_exponential((draws, len(some)))
    with np.errstate(divide="ignore"):
        sampled = (waits / target_probs[some]).argmin(axis=1)  # [draws]
        drafted = waits / draft_probs[some]  # [draws, some]
    ranks = (drafted < drafted[np.arange(draws), sampled][:, None]).sum(axis=1)
    found: Floats = (ranks[:, None] < np.arange(1, most + 1)).mean(axis=0)
    return found


@dataclass(frozen=True, slots=True)
class Agreement:
    """A measured rate beside that of the chances of the same positions.

    [low, high] is the 95 % sampling interval of `measured` about `expected`. Each position has its own noise,
    so that it counts is a Bernoulli variable with its chance.
    """

    measured: float
    expected: float
    low: float
    high: float
    positions: int

    @property
    def agrees(self) -> bool:
        """Return True if the measured rate lies within the interval."""
        return self.low <= self.measured <= self.high


def agreement(right: Sequence[bool], chances: Sequence[float], draws: int = 0) -> Agreement:
    """Return the agreement over all positions. Raise ValueError if there is none.

    If the chances are estimates from so many `draws`, the interval covers their error, too.
    """
    if not right:
        raise ValueError("right: must hold a draft token; the draft proposed none")
    expected = np.array(chances)
    variance = float(np.sum(expected * (1 - expected)))
    if draws:
        variance *= (draws + 1) / (draws - 1)
    spread, mean = _NORMAL_95 * variance**0.5 / len(right), float(expected.mean())
    return Agreement(float(np.mean(right)), mean, mean - spread, mean + spread, len(right))

"""Compute the acceptance rate of a draft that shares the target's noise, and the best possible rate.

Draft and target that add the same Gumbel noise to their logits sample the same token with probability

    sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i)

(Daliri, Musco, Suresh, arXiv 2408.07978); the optimal coupling, which would need to know both distributions,
reaches 1 - TV(p, q).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]

_NORMAL_95 = 1.959964


def match_chance(target_probs: _Floats, draft_probs: _Floats) -> float:
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


def optimal_chance(target_probs: _Floats, draft_probs: _Floats) -> float:
    """Return 1 - TV: how often the best coupling of the distributions [vocab] samples the same token."""
    p, q = target_probs / target_probs.sum(), draft_probs / draft_probs.sum()
    return float(np.minimum(p, q).sum())


@dataclass(frozen=True, slots=True)
class Heldout:
    """One answer at temperature 1, by position: predicted rates, and whether the draft token was right.

    `closed` is the closed form, `optimal` the chance of the optimal coupling.
    """

    closed: tuple[float, ...]
    optimal: tuple[float, ...]
    right: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Measured acceptance beside the closed form of the same positions.

    [low, high] is the 95 % sampling interval of `measured` about `closed`. Each position has its own noise,
    so whether its draft token is right is a Bernoulli variable with the probability of the closed form.
    """

    measured: float
    closed: float
    low: float
    high: float
    optimal: float
    positions: int

    @property
    def agrees(self) -> bool:
        """Return True if the measured acceptance lies within the interval."""
        return self.low <= self.measured <= self.high


def agreement(heldout: Sequence[Heldout]) -> Agreement:
    """Return the agreement over all positions. Raise ValueError if there is none."""
    closed = np.array([chance for of in heldout for chance in of.closed])
    if not len(closed):
        raise ValueError("heldout: must hold a draft token; the draft guessed nothing at temperature 1")
    right = np.array([was for of in heldout for was in of.right])
    optimal = np.array([chance for of in heldout for chance in of.optimal])
    spread = _NORMAL_95 * float(np.sqrt(np.sum(closed * (1 - closed)))) / len(closed)
    mean = float(closed.mean())
    return Agreement(
        measured=float(right.mean()),
        closed=mean,
        low=mean - spread,
        high=mean + spread,
        optimal=float(optimal.mean()),
        positions=len(closed),
    )

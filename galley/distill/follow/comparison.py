"""Compare two drafts on the same held-out sessions: the new one is offered only if it is better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galley.core.versions.counts import Estimate, effective
from galley.distill.data.corpus import Corpus
from galley.distill.training.evaluation import Bools

MIXED = "corpus"
"""The part of the conversations that are mixed in, beside those of the principals."""

_Z = 2.0
"""One look at the held-out sessions: a draft that is no better is offered once in some forty cycles."""
_Z_WORSE = 3.0
"""There may be many parts, and one that is worse by chance must not refuse a draft."""
FEWEST_SESSIONS = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """Shares of the answers' tokens that two drafts propose; `difference` is that of the pairs."""

    present: float
    new: float
    difference: Estimate

    def __str__(self) -> str:
        error = self.difference.error
        return f"acceptance {self.new:.3f} after {self.present:.3f}, their difference ± {error:.3f}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The figures of a new draft and the present one, over all sessions and over those of each part."""

    all: Measured
    parts: Mapping[str, Measured]

    def problem(self) -> str:
        """Return why the new draft is not to be offered; empty: it is better."""
        sessions = self.all.difference.sessions
        if sessions < FEWEST_SESSIONS:
            return f"{sessions:.1f} of {FEWEST_SESSIONS} effective held-out sessions"
        if self.all.difference.interval(_Z)[0] <= 0:
            return f"not better: {self.all}"
        for name, part in self.parts.items():
            if part.difference.interval(_Z_WORSE)[1] < 0:
                return f"worse for {name}: {part}"
        return ""


def compared(held_out: Corpus, names: Sequence[str], before: Bools, after: Bools) -> Comparison:
    """Return the comparison of two drafts by their hits, for each token of all answers.

    `names` has the part of each session. Those of MIXED are a part, but do not count in the whole.
    """
    starts = held_out.answer_offsets[:-1]
    hits = [np.add.reduceat(of_draft.astype(np.int64), starts) for of_draft in (before, after)]
    places = {name: np.array([one == name for one in names]) for name in sorted(set(names))}
    own = np.array([name != MIXED for name in names])

    def of(chosen: NDArray[np.bool_]) -> Measured:
        return paired(hits[0][chosen], hits[1][chosen], held_out.answer_len[chosen])

    return Comparison(of(own), {name: of(chosen) for name, chosen in places.items()})


def paired(before: NDArray[np.int64], after: NDArray[np.int64], tokens: NDArray[np.int64]) -> Measured:
    """Return the acceptance of two drafts by their hits in the same sessions, which have so many tokens.

    The difference is a ratio of sums over sessions (Cochran 1977, "Sampling Techniques", section 6.4).
    """
    total = int(tokens.sum())
    if not total:
        return Measured(0.0, 0.0, Estimate(0.0, math.inf, 0))
    count = effective(total, int((tokens**2).sum()))
    gained = after - before
    ratio = float(gained.sum()) / total
    error = math.inf
    if count >= 2:
        residual = float(((gained - ratio * tokens) ** 2).sum())
        error = math.sqrt(residual * count / (count - 1)) / total
    estimate = Estimate(ratio, error, count)
    return Measured(float(before.sum()) / total, float(after.sum()) / total, estimate)

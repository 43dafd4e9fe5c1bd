"""Statistics of a session's hints at the target: how good they are, and when they arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence

from galley.core.trees import ROOT, Parents, chances

# Acceptance of a session without history: optimistic, so that drafts are tried.
PRIOR_ALPHA = 0.7
# Weight of one token, once many were seen. The first ones form a plain mean with a prior of some tokens.
_ALPHA_WEIGHT = 0.05
_PRIOR_TOKENS = 5
# Calibration raises no chance beyond this: the rule of succession if all tokens in memory were right.
_SUREST = 1.0 - _ALPHA_WEIGHT / 2
# Sides are rarely right, so more of them are counted; and before them as many right as predicted ones.
_SIDES_WEIGHT = 0.02
_PRIOR_SIDES = 2.0
_PRIOR_RECOVERY = 0.25
_RECOVERY_WEIGHT = 0.15
_GOOD_RECOVERY = 0.5
_DELAY_WEIGHT = 0.25
# A hint is late after this many deviations beyond the mean delay, as in RFC 6298, section 2.
_DELAY_MARGIN = 2.0
# The margin is at least this share of the mean (section 2.4 there): delays of no deviation vary a little.
_LEAST_MARGIN = 0.15
# One delay counts with at most this many margins beyond the mean.
_MOST_ERROR = 2.0
_RECOVERY = 0.5
_MIN_TRUST = 0.01


class AcceptanceEstimate:
    """A session's measured chance that a draft token is right if all before it were: `alpha`.

    `recovery` is the chance that the token after a wrong one is right. Both learn from all hinted tokens,
    verified or not, so that drafts that become good again are noticed. `bias` is how much more often tokens
    are right than the draft predicted.

    These three are about the first candidate for a position. The other candidates are its sides. They are
    seldom right, so they have a factor in place of a bias: how many were right for each that the draft
    predicted. `sides` counts both, over about the last 50 positions.
    """

    __slots__ = ("_overall", "_seen", "alpha", "bias", "recovery", "sides")

    def __init__(self, overall: AcceptanceEstimate | None = None) -> None:
        self._overall = overall
        self.alpha: float = overall.alpha if overall else PRIOR_ALPHA
        self.bias = 0.0
        self.recovery: float = overall.recovery if overall else _PRIOR_RECOVERY
        self._seen = _PRIOR_TOKENS
        self.sides: tuple[float, float] = overall.sides if overall else (0.0, 0.0)

    def record_token(self, *, right: bool, predicted: float | None = None) -> None:
        if self._overall is not None:
            self._overall.record_token(right=right)
        self._seen += 1
        self.alpha += max(_ALPHA_WEIGHT, 1.0 / self._seen) * (right - self.alpha)
        if predicted is not None:
            self.bias += _ALPHA_WEIGHT * (right - predicted - self.bias)

    def record_sides(self, *, right: bool, predicted: float) -> None:
        """Record whether one of the sides of a position was right, and the sum of their chances."""
        if self._overall is not None:
            self._overall.record_sides(right=right, predicted=predicted)
        kept = 1.0 - _SIDES_WEIGHT
        self.sides = (kept * self.sides[0] + right, kept * self.sides[1] + predicted)

    @property
    def sides_factor(self) -> float:
        right, predicted = self.sides
        return (right + _PRIOR_SIDES) / (predicted + _PRIOR_SIDES)

    def calibrated_tree(self, parents: Parents, survival: Sequence[float]) -> list[float]:
        """Return the draft's survival chances of a tree, corrected; siblings' chances sum to at most 1."""
        corrected: list[float] = []
        left: dict[int, float] = {}  # by parent: the chance that none of the candidates so far is right
        factor = self.sides_factor
        for parent, predicted in zip(parents, chances(parents, survival), strict=True):
            if parent in left:
                chance = min(left[parent], predicted * factor)
            else:
                (chance,) = self.calibrated((predicted,))
            left[parent] = left.get(parent, 1.0) - chance
            corrected.append(chance if parent == ROOT else corrected[parent] * chance)
        return corrected

    def calibrated(self, survival: Sequence[float]) -> list[float]:
        """Return the draft's survival chances corrected by `bias`: falling, in [0, 1].

        No chance is raised to 1, or a step would verify far ahead for one session and leave others no row.
        """
        chances: list[float] = []
        before = now = 1.0
        for reached in survival:
            chance = reached / before if before > 0.0 else 0.0
            now *= min(max(chance, _SUREST), max(0.0, chance + self.bias))
            chances.append(now)
            before = reached
        return chances

    def record_recovery(self, *, right: bool) -> None:
        if self._overall is not None:
            self._overall.record_recovery(right=right)
        self.recovery += _RECOVERY_WEIGHT * (right - self.recovery)

    @property
    def can_recover(self) -> bool:
        """Return True if the rest of a hint after a wrong token is as good as a fresh one."""
        return self.recovery >= max(self.alpha, _GOOD_RECOVERY)

    def survival(self, count: int) -> list[float]:
        """Return the chance that draft tokens 0 to i are all accepted, for each i < count."""
        return [self.alpha ** (i + 1) for i in range(count)]


def leveled(chances: Sequence[float]) -> list[float]:
    """Return chances that fall, for tokens of which always the first ones are taken.

    A token that is likelier than one before it can only be taken with that one, so both get their mean: the
    pool of adjacent violators of isotonic regression.
    """
    levels: list[tuple[float, int]] = []
    for chance in chances:
        total, count = chance, 1
        while levels and levels[-1][0] * count < total * levels[-1][1]:
            before, more = levels.pop()
            total, count = total + before, count + more
        levels.append((total, count))
    return [total / count for total, count in levels for _ in range(count)]


class HintTiming:
    """Timing of a session's hints: their mean delay after a result, its deviation, and their length.

    A session starts with the timing of all sessions, `overall`. The delay of its first hint does not count,
    because the draft had to read the prompt. `trust` is the chance that a hint that is due comes.
    """

    __slots__ = ("_first", "_overall", "delay_ns", "deviation_ns", "length", "trust")

    def __init__(self, overall: HintTiming | None = None) -> None:
        self._overall = overall
        self._first = overall is not None
        self.delay_ns: float | None = overall.delay_ns if overall else None
        self.deviation_ns: float = overall.deviation_ns if overall else 0.0
        self.length: float = overall.length if overall else 0.0
        self.trust = 1.0

    def record_arrival(self, delay_ns: int, length: int) -> None:
        """Record a hint of `length` tokens that arrived this long after the result that it is anchored at."""
        self.trust += _RECOVERY * (1.0 - self.trust)
        self.length += _DELAY_WEIGHT * (length - self.length) if self.length else length
        if self._first:
            self._first = False
            return
        self._learn(delay_ns)
        if self._overall is not None:
            self._overall.record_arrival(delay_ns, length)

    def _learn(self, delay_ns: int) -> None:
        if self.delay_ns is None:
            self.delay_ns, self.deviation_ns = float(delay_ns), delay_ns / 2
            return
        # A very late hint, of a draft that was interrupted, says little of the next.
        error = min(delay_ns - self.delay_ns, _MOST_ERROR * self._margin_ns(self.delay_ns))
        self.deviation_ns += _DELAY_WEIGHT * (abs(error) - self.deviation_ns)
        self.delay_ns += _DELAY_WEIGHT * error

    def _margin_ns(self, delay_ns: float) -> float:
        return max(_DELAY_MARGIN * self.deviation_ns, _LEAST_MARGIN * delay_ns)

    def record_absence(self) -> None:
        self.trust = max(_MIN_TRUST, self.trust / 2)

    def expected_at(self, result_ns: int) -> tuple[float, float]:
        """Return the mean time of the hint after a result, and when it is late, in ns; inf while unknown."""
        if self.delay_ns is None:
            return math.inf, math.inf
        mean_ns = result_ns + self.delay_ns
        return mean_ns, mean_ns + self._margin_ns(self.delay_ns)

"""What the target has learned of a session's hints: how good they are, and when they come."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Of a session whose drafts have not been seen yet: optimistic, so that they are tried.
PRIOR_ALPHA = 0.7
# Of one token, once many were seen; the first make a plain mean, in which the prior counts as so many tokens.
_ALPHA_WEIGHT = 0.05
_PRIOR_TOKENS = 5
# What a draft is believed beyond its word, were all of these right: the rule of succession.
_SUREST = 1.0 - _ALPHA_WEIGHT / 2
_PRIOR_RECOVERY = 0.25
_RECOVERY_WEIGHT = 0.15
_GOOD_RECOVERY = 0.5
_DELAY_WEIGHT = 0.25
# Deviations beyond the mean delay that a hint is given, as TCP gives acknowledgements (RFC 6298, section 2).
_DELAY_MARGIN = 2.0
# And at least this share of the mean (as section 2.4 there): or one that is always as late misses by a hair.
_LEAST_MARGIN = 0.15
# Of what one delay is beyond the mean, at most so many margins count.
_MOST_ERROR = 2.0
_RECOVERY = 0.5
_MIN_TRUST = 0.01


class AcceptanceEstimate:
    """A session's chance that a draft token is right if all before it were, as measured: `alpha`.

    `recovery` is the chance that the token after a wrong one is right. Learnt from all that is hinted, be it
    verified or just decoded meanwhile: so drafts that have become good again are noticed. `bias` is how much
    more often tokens are right than was told: a draft that is too sure of itself costs no rows for long.
    """

    __slots__ = ("_overall", "_seen", "alpha", "bias", "recovery")

    def __init__(self, overall: AcceptanceEstimate | None = None) -> None:
        """A session begins with what `overall`, those of all sessions, are like."""
        self._overall = overall
        self.alpha: float = overall.alpha if overall else PRIOR_ALPHA
        self.bias = 0.0
        self.recovery: float = overall.recovery if overall else _PRIOR_RECOVERY
        self._seen = _PRIOR_TOKENS

    def record_token(self, *, right: bool, predicted: float | None = None) -> None:
        """See `hints.Listener`."""
        if self._overall is not None:
            self._overall.record_token(right=right)
        self._seen += 1
        self.alpha += max(_ALPHA_WEIGHT, 1.0 / self._seen) * (right - self.alpha)
        if predicted is not None:
            self.bias += _ALPHA_WEIGHT * (right - predicted - self.bias)

    def calibrated(self, survival: Sequence[float]) -> list[float]:
        """What drafts say of their chances, by what became of such: falling, in [0, 1].

        None becomes certain by that: a pass would go far with one session and leave no row for others.
        """
        chances: list[float] = []
        before = now = 1.0
        for told in survival:
            chance = told / before if before > 0.0 else 0.0
            now *= min(max(chance, _SUREST), max(0.0, chance + self.bias))
            chances.append(now)
            before = told
        return chances

    def record_recovery(self, *, right: bool) -> None:
        """See `hints.Listener`."""
        if self._overall is not None:
            self._overall.record_recovery(right=right)
        self.recovery += _RECOVERY_WEIGHT * (right - self.recovery)

    @property
    def can_recover(self) -> bool:
        """Is what is left after a wrong token as good as a fresh draft?"""
        return self.recovery >= max(self.alpha, _GOOD_RECOVERY)

    def survival(self, count: int) -> list[float]:
        """The chance that draft tokens 0 to i are all accepted, for each i < count."""
        return [self.alpha ** (i + 1) for i in range(count)]


class HintTiming:
    """How long after a result a session's hints come, how long they are, and whether they come at all.

    `delay_ns` is the mean, `deviation_ns` the mean distance from it. A session begins with what `overall`,
    those of all sessions, are like. Its first hint tells no delay: the draft has read the prompt first.
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
        """A hint of `length` tokens came this long after the result that it is anchored at."""
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
        # One that is very late, for the draft was interrupted, says little of the next.
        error = min(delay_ns - self.delay_ns, _MOST_ERROR * self._margin_ns(self.delay_ns))
        self.deviation_ns += _DELAY_WEIGHT * (abs(error) - self.deviation_ns)
        self.delay_ns += _DELAY_WEIGHT * error

    def _margin_ns(self, delay_ns: float) -> float:
        return max(_DELAY_MARGIN * self.deviation_ns, _LEAST_MARGIN * delay_ns)

    def record_absence(self) -> None:
        """It was waited for in vain."""
        self.trust = max(_MIN_TRUST, self.trust / 2)

    def expected_at(self, result_ns: int) -> tuple[float, float]:
        """When the hint after a result at `result_ns` comes in the mean, and when it should be here.

        Infinity while nothing is known.
        """
        if self.delay_ns is None:
            return math.inf, math.inf
        mean_ns = result_ns + self.delay_ns
        return mean_ns, mean_ns + self._margin_ns(self.delay_ns)

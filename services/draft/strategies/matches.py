"""Estimate how often a match is followed by the same token again, by the length of the match."""

from __future__ import annotations

from bisect import bisect_right

from galley.core.lookup.calibration import Calibration
from services.draft.strategies.lookups import Match

# The shortest match of each class.
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
# The prior probability of a match of n tokens is n / (n + this), in the session's own tokens and in recent
# answers.
_OWN_DOUBT = 2
_ANSWERS_DOUBT = 4
STRENGTH = 10.0
# Classes of matches in the session itself, then in answers.
PRIOR = tuple(n / (n + doubt) for doubt in (_OWN_DOUBT, _ANSWERS_DOUBT) for n in LENGTHS)


def class_of(match: Match, further: int = 0) -> int:
    """Return the class, an index of PRIOR, of a match after `further` accepted tokens."""
    length = bisect_right(LENGTHS, match.found.matched + further) - 1
    return length if match.own else length + len(LENGTHS)


class MatchChances:
    """Acceptance rates by class; those of a workload start from the rates of its tenant."""

    def __init__(self, calibration: Calibration | None = None) -> None:
        self._calibration = calibration or Calibration(PRIOR, STRENGTH)

    def narrowed(self) -> MatchChances:
        """Return the rates of one workload, which start from these of all workloads."""
        return MatchChances(self._calibration.child())

    def chance(self, match: Match, i: int) -> float:
        """Return the probability that the i-th token after the match is accepted if those before are."""
        return self._calibration.chance(class_of(match, i))

    def record(self, match: Match, i: int, accepted: bool) -> None:
        """Record whether the i-th token after the match was accepted, those before having been."""
        self._calibration.record(class_of(match, i), accepted)

"""How often what followed a match before follows it again, as measured, by the length of the match."""

from __future__ import annotations

from bisect import bisect_right

from galley.core.lookup.calibration import Calibration
from services.draft.strategies.lookups import Match

# From which length on a match is of which class.
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
# Before anything is measured, a match of n tokens goes on with chance n / (n + this): in the session's own
# tokens, and in recent answers.
_OWN_DOUBT = 2
_ANSWERS_DOUBT = 4
STRENGTH = 10.0
# Matches in the session itself, and in answers.
PRIOR = tuple(n / (n + doubt) for doubt in (_OWN_DOUBT, _ANSWERS_DOUBT) for n in LENGTHS)


def class_of(match: Match, further: int = 0) -> int:
    """Of PRIOR's: after so many `further` tokens of the match have come true."""
    length = bisect_right(LENGTHS, match.found.matched + further) - 1
    return length if match.own else length + len(LENGTHS)


class MatchChances:
    """Learnt from verdicts; those of one workload from the others of its tenant too."""

    def __init__(self, calibration: Calibration | None = None) -> None:
        self._calibration = calibration or Calibration(len(PRIOR), PRIOR, STRENGTH)

    def narrowed(self) -> MatchChances:
        """Of one workload, where this is of all."""
        return MatchChances(self._calibration.child())

    def chance(self, match: Match, i: int) -> float:
        """That the i-th token after the match is right if those before it are."""
        return self._calibration.chance(class_of(match, i))

    def saw(self, match: Match, i: int, accepted: bool) -> None:
        """The i-th token after it was right, or the first that was not."""
        self._calibration.record(class_of(match, i), accepted)

"""Choose between the next tokens of a lookup and of a model, and estimate how likely the choice is right.

Both are calibrated wherever both have a candidate, whichever was chosen. A token on which both agree is much
more likely right, so there are tables for each alone, for agreement, and for each in disagreement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter

from galley.core.lookup.calibration import Calibration
from services.draft.strategies.lookups import LENGTHS, PRIOR, STRENGTH
from services.draft.strategies.model_steps import CONFIDENCES

# A lookup this likely to be right needs no step of the model.
_SURE = 0.7
# Three classes of match lengths where both agree: each begins at one of these.
_SHORT = (0, 1, 4)
# Greedy and sampled tokens have classes of their own.
_BUCKETS = CONFIDENCES * 2
_CLASSES = PRIOR * 2
_BOTH = tuple(1 - (1 - confidence) * (1 - PRIOR[first]) for confidence in _BUCKETS for first in _SHORT)
# Where they differ at least one is wrong, a lookup more often than a model.
_LESS = tuple(chance**2 for chance in _CLASSES)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token and its evidence: the class of a match, or the bucket of the model's confidence."""

    token: int
    evidence: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """The candidates for one position, of a lookup and of a model; at least one is not None."""

    lookup: Candidate | None
    model: Candidate | None


@dataclass(frozen=True, slots=True)
class Ensemble:
    """Calibration of a lookup and a model: each alone, both agreeing, and each against the other."""

    lookup: Calibration = field(default_factory=lambda: Calibration(_CLASSES, STRENGTH))
    alone: Calibration = field(default_factory=lambda: Calibration(_BUCKETS, STRENGTH))
    both: Calibration = field(default_factory=lambda: Calibration(_BOTH, STRENGTH))
    lookup_against: Calibration = field(default_factory=lambda: Calibration(_LESS, STRENGTH))
    model_against: Calibration = field(default_factory=lambda: Calibration(_BUCKETS, STRENGTH))

    def child(self) -> Ensemble:
        """Return the ensemble of a part of the sessions, which starts from this one."""
        tables = (self.lookup, self.alone, self.both, self.lookup_against, self.model_against)
        return Ensemble(*(table.child() for table in tables))

    def is_sure(self, lookup: Candidate) -> bool:
        """Return whether the lookup is certain enough without the model."""
        return self.lookup.chance(lookup.evidence) >= _SURE

    def choose(self, candidates: Candidates) -> tuple[int, float]:
        """Return the likelier token, the model's if both are as likely, and its probability."""
        chance, token = max(
            ((table.chance(bucket), token) for token, table, bucket in self._evidence(candidates)),
            key=itemgetter(0),
        )
        return token, chance

    def record(self, candidates: Candidates, confirmed: int) -> None:
        """Record the confirmed token of a position whose earlier draft tokens were all accepted."""
        lookup = candidates.lookup
        if lookup is not None:
            self.lookup.record(lookup.evidence, lookup.token == confirmed)
        if candidates.model is not None:
            for token, table, bucket in self._evidence(candidates):
                table.record(bucket, token == confirmed)

    def _evidence(self, candidates: Candidates) -> list[tuple[int, Calibration, int]]:
        """Return each token with the table and the bucket that tell its probability."""
        lookup, model = candidates.lookup, candidates.model
        if lookup is None:
            return [] if model is None else [(model.token, self.alone, model.evidence)]
        if model is None:
            return [(lookup.token, self.lookup, lookup.evidence)]
        if lookup.token == model.token:
            return [(lookup.token, self.both, _agreeing(lookup, model))]
        return [
            (model.token, self.model_against, model.evidence),
            (lookup.token, self.lookup_against, lookup.evidence),
        ]


def _agreeing(lookup: Candidate, model: Candidate) -> int:
    length = lookup.evidence % len(LENGTHS)
    return model.evidence * len(_SHORT) + sum(length >= first for first in _SHORT) - 1

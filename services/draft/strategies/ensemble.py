"""Choose between the next tokens of a lookup and of a model, and estimate how likely the choice is right.

Both are calibrated wherever both have a candidate, whichever was chosen. A token on which both agree is much
more likely right, so there are tables for each alone, for agreement, and for each in disagreement.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from galley.core.lookup.calibration import Calibration
from services.draft.strategies.matches import LENGTHS, PRIOR, STRENGTH
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

    def narrowed(self) -> Ensemble:
        """Return the ensemble of one workload, which starts from this one of all workloads."""
        tables = (self.lookup, self.alone, self.both, self.lookup_against, self.model_against)
        return Ensemble(*(table.child() for table in tables))

    def is_sure(self, lookup: Candidate) -> bool:
        """Return whether the lookup is certain enough without the model."""
        return self.lookup.chance(lookup.evidence) >= _SURE

    def choose(self, candidates: Candidates) -> tuple[int, float]:
        """Return the likelier token and its probability. Raises ValueError without a candidate."""
        lookup, model = candidates.lookup, candidates.model
        match (lookup, model):
            case (Candidate(), None):
                return lookup.token, self.lookup.chance(lookup.evidence)
            case (None, Candidate()):
                return model.token, self.alone.chance(model.evidence)
            case (Candidate(), Candidate()) if lookup.token == model.token:
                return lookup.token, self.both.chance(_agreeing(lookup, model))
            case (Candidate(), Candidate()):
                theirs, its = (
                    self.lookup_against.chance(lookup.evidence),
                    self.model_against.chance(model.evidence),
                )
                return (lookup.token, theirs) if theirs > its else (model.token, its)
            case _:
                raise ValueError("no candidate")

    def record(self, candidates: Candidates, confirmed: int) -> None:
        """Record the confirmed token of a position whose earlier draft tokens were all accepted."""
        lookup, model = candidates.lookup, candidates.model
        if lookup is not None:
            self.lookup.record(lookup.evidence, lookup.token == confirmed)
        if model is None:
            return
        if lookup is None:
            self.alone.record(model.evidence, model.token == confirmed)
        elif lookup.token == model.token:
            self.both.record(_agreeing(lookup, model), model.token == confirmed)
        else:
            self.lookup_against.record(lookup.evidence, lookup.token == confirmed)
            self.model_against.record(model.evidence, model.token == confirmed)


def _agreeing(lookup: Candidate, model: Candidate) -> int:
    length = lookup.evidence % len(LENGTHS)
    return model.evidence * len(_SHORT) + sum(length >= first for first in _SHORT) - 1

"""Two opinions of the next token, a lookup's and a model's: which to take, and how likely it is right.

Both are judged wherever both have spoken, whichever was taken. A token that both say is far likelier right
than either is alone: so there are tables for a model that has no lookup beside it, for both agreeing, and
for each where they differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from galley.core.lookup.calibration import Calibration
from services.draft.strategies.matches import LENGTHS, PRIOR, STRENGTH
from services.draft.strategies.steps import CONFIDENCES

# A lookup this likely to be right is not worth asking the model about.
_SURE = 0.7
# Matches are told apart by three lengths where both agree: a class from each of these on.
_SHORT = (0, 1, 4)
# Greedy tokens and sampled ones are told apart.
_BUCKETS = CONFIDENCES * 2
_CLASSES = PRIOR * 2
_BOTH = tuple(1 - (1 - confidence) * (1 - PRIOR[first]) for confidence in _BUCKETS for first in _SHORT)
# Where they differ, one at least is wrong: a lookup more often than a model.
_LESS = tuple(chance**2 for chance in _CLASSES)


@dataclass(frozen=True, slots=True)
class Said:
    """A token, and what it rests on: a match's class, or a bucket of the model's confidence."""

    token: int
    by: int


@dataclass(frozen=True, slots=True)
class Opinions:
    """Of one position: what a lookup `found`, and the `model`'s; None: has not spoken. One of them has."""

    found: Said | None
    model: Said | None


@dataclass(frozen=True, slots=True)
class Opined:
    """What became of opinions: chances of each alone, of both agreeing, and of each against the other."""

    found: Calibration = field(default_factory=lambda: Calibration(len(_CLASSES), _CLASSES, STRENGTH))
    alone: Calibration = field(default_factory=lambda: Calibration(len(_BUCKETS), _BUCKETS, STRENGTH))
    both: Calibration = field(default_factory=lambda: Calibration(len(_BOTH), _BOTH, STRENGTH))
    found_against: Calibration = field(default_factory=lambda: Calibration(len(_LESS), _LESS, STRENGTH))
    model_against: Calibration = field(default_factory=lambda: Calibration(len(_BUCKETS), _BUCKETS, STRENGTH))

    def narrowed(self) -> Opined:
        """Of one workload, where this is of all."""
        tables = (self.found, self.alone, self.both, self.found_against, self.model_against)
        return Opined(*(table.child() for table in tables))

    def sure(self, found: Said) -> bool:
        """Need the model not be asked?"""
        return self.found.chance(found.by) >= _SURE

    def choose(self, said: Opinions) -> tuple[int, float]:
        """The likelier token, and its chance. Raises ValueError if nobody has spoken."""
        found, model = said.found, said.model
        match (found, model):
            case (Said(), None):
                return found.token, self.found.chance(found.by)
            case (None, Said()):
                return model.token, self.alone.chance(model.by)
            case (Said(), Said()) if found.token == model.token:
                return found.token, self.both.chance(_agreeing(found, model))
            case (Said(), Said()):
                theirs, its = self.found_against.chance(found.by), self.model_against.chance(model.by)
                return (found.token, theirs) if theirs > its else (model.token, its)
            case _:
                raise ValueError("an opinion is wanted")

    def saw(self, said: Opinions, confirmed: int) -> None:
        """This token was confirmed where that was said, all guesses before it having been right."""
        found, model = said.found, said.model
        if found is not None:
            self.found.record(found.by, found.token == confirmed)
        if model is None:
            return
        if found is None:
            self.alone.record(model.by, model.token == confirmed)
        elif found.token == model.token:
            self.both.record(_agreeing(found, model), model.token == confirmed)
        else:
            self.found_against.record(found.by, found.token == confirmed)
            self.model_against.record(model.by, model.token == confirmed)


def _agreeing(found: Said, model: Said) -> int:
    length = found.by % len(LENGTHS)
    return model.by * len(_SHORT) + sum(length >= first for first in _SHORT) - 1

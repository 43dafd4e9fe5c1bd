"""Prompt lookup where it is expected to be accepted further than the model; the model everywhere else."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from services.core.calibration import Calibration
from services.core.hindsight import Hindsight
from services.core.last_used import LastUsed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.draft.strategies.base import DraftJob, DraftSession, Guess, Strategy
    from services.draft.strategies.ngram import Kind

_MOST_KINDS = 1024
# What the model's acceptance is told apart by: the position in its proposal, the last for all beyond.
_POSITIONS = 16
_PRIOR = 0.5
_STRENGTH = 10.0


class HybridStrategy:
    """`lookup` is asked for each guess, and is done at once; `model` only for those that it drafts."""

    def __init__(self, lookup: Strategy, model: Strategy) -> None:
        self._lookup = lookup
        self._model = model
        self._drafted: WeakKeyDictionary[DraftSession, Hindsight] = WeakKeyDictionary()
        self._chances: LastUsed[Kind, Calibration] = LastUsed(_chances, _MOST_KINDS)
        self._overall: LastUsed[bytes, Calibration] = LastUsed(_chances, _MOST_KINDS)

    def begin(self, jobs: Sequence[DraftJob]) -> list[Guess]:
        """See `Strategy.begin`."""
        for job in jobs:
            if waiting := self._drafted.get(job.session):
                waiting.confirm(job.session.tokens[: job.session.confirmed])
        guesses = self._lookup.begin(jobs)
        drafted = [i for i, guess in enumerate(guesses) if not self._stands(guess)]
        for i, guess in zip(drafted, self._model.begin([jobs[i] for i in drafted]), strict=True):
            guesses[i] = guess
            self._expect(guess)
        return guesses

    def advance(self, guesses: Sequence[Guess]) -> None:
        """See `Strategy.advance`: what is not done is the model's."""
        self._model.advance(guesses)

    def _chances_of(self, job: DraftJob) -> Calibration:
        overall = self._overall.of(job.slice.key[0])
        return self._chances.of(_kind(job), lambda: _chances(overall))

    def _stands(self, guess: Guess) -> bool:
        """Are as many of its tokens expected to be accepted as of the model's, as measured of late?

        A lookup that is still following a long prompt need not be waited for: the model has work to do too.
        """
        return guess.done and sum(guess.survival) >= _expected(self._chances_of(guess.job), guess.job.k)

    def _expect(self, guess: Guess) -> None:
        session = guess.job.session
        waiting = self._drafted.setdefault(session, Hindsight())
        ahead = session.tokens[session.confirmed :]
        saw = partial(_saw, self._chances_of(guess.job))
        waiting.expect(session.confirmed, ahead, guess.tokens, saw)


def _expected(chances: Calibration, k: int) -> float:
    """How many of `k` tokens of the model are accepted in the mean."""
    expected, surviving = 0.0, 1.0
    for i in range(k):
        surviving *= chances.chance(min(i, _POSITIONS - 1))
        expected += surviving
    return expected


def _kind(job: DraftJob) -> Kind:
    return job.slice.key[0], job.workload


def _chances(overall: Calibration | None = None) -> Calibration:
    return Calibration(_POSITIONS, [_PRIOR] * _POSITIONS, _STRENGTH, overall)


def _saw(chances: Calibration, position: int, accepted: bool) -> None:
    chances.saw(min(position, _POSITIONS - 1), accepted)

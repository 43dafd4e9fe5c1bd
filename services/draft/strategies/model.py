"""A small model of the target's tokenizer guesses (`steps.py`).

What it guessed is kept beside its keys and values: tokens of a session's next item that it has guessed
already need no step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from services.core.calibration import Calibration
from services.core.content import agreement
from services.core.last_used import LastUsed
from services.draft.strategies.base import rules_of
from services.draft.strategies.drafted import Drafted
from services.draft.strategies.lookups import kind_of
from services.draft.strategies.opinions import Said
from services.draft.strategies.steps import CONFIDENCES, SteppedGuess

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.draft.strategies.base import Doubt, DraftJob, DraftSession, Guess
    from services.draft.strategies.lookups import Kind
    from services.draft.strategies.steps import ModelSteps
    from services.engine.guessing import Second

# Verdicts that the confidence itself weighs, and workloads whose acceptance is kept.
_STRENGTH = 8.0
_WORKLOADS = 256


class ModelStrategy:
    """Drafts with a model; how often it is right is learnt by tenant and workload."""

    def __init__(self, steps: ModelSteps) -> None:
        self._steps = steps
        # What was guessed of each session, by its buckets.
        self._drafted: WeakKeyDictionary[DraftSession, Drafted[Said]] = WeakKeyDictionary()
        self._calibrations: LastUsed[Kind, Calibration] = LastUsed(_calibration, _WORKLOADS)
        self._overall: LastUsed[bytes, Calibration] = LastUsed(_calibration, _WORKLOADS)

    def begin(self, jobs: Sequence[DraftJob]) -> list[Guess]:
        """See `Strategy.begin`."""
        return [self._begin(job) for job in jobs]

    def advance(self, guesses: Sequence[Guess]) -> None:
        """See `Strategy.advance`; while a long prompt is being fed, its guess gets no token."""
        for drawn in self._steps.advance([guess for guess in guesses if isinstance(guess, SteppedGuess)]):
            job, said = drawn.guess.job, Said(drawn.token, drawn.bucket, drawn.second)
            self._drafted[job.session].append(said.token, said)
            drawn.guess.add(said.token, self._calibration_of(job).chance(said.by))

    def doubts(self, job: DraftJob) -> list[Doubt]:
        """See `Preparing.doubts`."""
        calibration = self._calibration_of(job)

        def weigh(said: Said) -> tuple[float, Second | None]:
            return calibration.chance(said.by), said.second

        return self._drafted[job.session].doubts(weigh)

    def branch(self, job: DraftJob, doubt: Doubt, k: int) -> Guess | None:
        """See `Preparing.branch`."""
        tokens = self._drafted[job.session].outcome(job.session, doubt)
        guess = self._steps.branch(job, tokens, k)
        if guess is not None:
            self._drafted[guess.job.session] = Drafted(len(tokens), rules_of(job.slice))
            guess.settle()
        return guess

    def adopt(self, job: DraftJob, branch: Guess) -> None:
        """See `Preparing.adopt`."""
        if isinstance(branch, SteppedGuess):
            self._learn(job, self._steps.open(job))
            self._steps.adopt(job.session, branch)
            self._drafted[job.session] = self._drafted[branch.job.session]

    def _begin(self, job: DraftJob) -> SteppedGuess:
        guess = self._steps.open(job)
        drafted, calibration = self._learn(job, guess), self._calibration_of(job)
        guess.settle()
        for token, said in drafted.ready(len(job.session.tokens), guess.limit, rules_of(job.slice)):
            guess.add(token, calibration.chance(said.by))
        self._steps.cut_back(guess)
        return guess

    def _learn(self, job: DraftJob, guess: SteppedGuess) -> Drafted[Said]:
        """From what has been confirmed of what was guessed; what of that stands is returned."""
        session, calibration = job.session, self._calibration_of(job)
        drafted = self._drafted.setdefault(session, Drafted())
        for verdict in drafted.compare(session, agreement(guess.cache.tokens, session.tokens)):
            calibration.saw(verdict.evidence.by, verdict.guessed == verdict.confirmed)
        return drafted

    def _calibration_of(self, job: DraftJob) -> Calibration:
        overall = self._overall.of(job.slice.key[0])
        return self._calibrations.of(kind_of(job), overall.narrowed)


def _calibration() -> Calibration:
    prior = CONFIDENCES * 2
    return Calibration(len(prior), prior, _STRENGTH)

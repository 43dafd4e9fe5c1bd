"""A small model of the target's tokenizer guesses (`steps.py`).

What it guessed is kept beside its keys and values: tokens of a session's next item that it has guessed
already need no step.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from galley.core.content import common_prefix_len
from galley.core.lookup.calibration import Calibration
from galley.core.lru import LruCache
from services.draft.strategies.base import DraftJob, DraftSession, Guess
from services.draft.strategies.drafted import Drafted
from services.draft.strategies.lookups import Kind, kind_of
from services.draft.strategies.steps import CONFIDENCES, ModelSteps, SteppedGuess, rules_of

# Verdicts that the confidence itself weighs, and workloads whose acceptance is kept.
_STRENGTH = 8.0
_WORKLOADS = 256


class ModelStrategy:
    """Drafts with a model; how often it is right is learnt by tenant and workload."""

    def __init__(self, steps: ModelSteps) -> None:
        self._steps = steps
        # What was guessed of each session, with its buckets.
        self._drafted: WeakKeyDictionary[DraftSession, Drafted[int]] = WeakKeyDictionary()
        self._calibrations: LruCache[Kind, Calibration] = LruCache(_calibration, _WORKLOADS)
        self._overall: LruCache[bytes, Calibration] = LruCache(_calibration, _WORKLOADS)

    def begin(self, jobs: Sequence[DraftJob]) -> list[Guess]:
        """See `Strategy.begin`."""
        return [self._begin(job) for job in jobs]

    def advance(self, guesses: Sequence[Guess]) -> None:
        """See `Strategy.advance`; while a long prompt is being fed, its guess gets no token."""
        for drawn in self._steps.advance([guess for guess in guesses if isinstance(guess, SteppedGuess)]):
            job = drawn.guess.job
            self._drafted[job.session].append(drawn.token, drawn.bucket)
            drawn.guess.add(drawn.token, self._calibration_of(job).chance(drawn.bucket))

    def _begin(self, job: DraftJob) -> SteppedGuess:
        guess, session = self._steps.open(job), job.session
        drafted = self._drafted.setdefault(session, Drafted())
        calibration = self._calibration_of(job)
        for verdict in drafted.compare(session, common_prefix_len(guess.cache.tokens, session.tokens)):
            calibration.record(verdict.evidence, verdict.guessed == verdict.confirmed)
        guess.settle()
        for token, bucket in drafted.ready(len(session.tokens), guess.limit, rules_of(job.slice)):
            guess.add(token, calibration.chance(bucket))
        self._steps.cut_back(guess)
        return guess

    def _calibration_of(self, job: DraftJob) -> Calibration:
        overall = self._overall.get(job.slice.key[0])
        return self._calibrations.get(kind_of(job), overall.child)


def _calibration() -> Calibration:
    prior = CONFIDENCES * 2
    return Calibration(len(prior), prior, _STRENGTH)

"""A small model of the target's tokenizer guesses, a token a step, all open guesses of a step together.

It samples with the target's noise: same seed, same position, its own distribution, so that it guesses what
the target will sample (Daliri et al., arXiv 2408.07978). What it guessed is kept beside its keys and values:
tokens of a session's next item that it has guessed already need no step.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from services.common.status import log_internal
from services.core.calibration import Calibration
from services.core.content import agreement
from services.core.errors import GalleyError
from services.core.last_used import LastUsed
from services.core.step import Draw
from services.draft.strategies.base import Guess
from services.draft.strategies.drafted import Drafted
from services.engine import guessing, sampling
from services.engine.guessing import guess as guess_tokens
from services.engine.model import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from services.common.slices import Slice
    from services.core.step import Sampled
    from services.draft.strategies.base import DraftJob, DraftSession
    from services.engine.model import CausalModel, SessionCache

# Tokens of a session that one step feeds: a long prompt must not hold up the others for long.
_PREFILL_ROWS = 128
# Buckets of confidence lie between these; finer towards 1, where the chances of many tokens are multiplied.
_EDGES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
_CONFIDENCES = tuple((low + high) / 2 for low, high in pairwise(_EDGES))
# Verdicts that the confidence itself weighs, and workloads whose acceptance is kept.
_STRENGTH = 8.0
_WORKLOADS = 256


@dataclass(frozen=True, slots=True)
class _Session:
    """What is kept of a session: the cache holds at least what stands before the first of `drafted`."""

    cache: SessionCache
    drafted: Drafted


@dataclass(slots=True)
class _ModelGuess(Guess):
    """One session's proposal in the making: at most `limit` tokens."""

    kept: _Session = field(kw_only=True)
    calibration: Calibration = field(kw_only=True)
    limit: int = field(kw_only=True)

    @property
    def draw(self) -> Draw:
        """The next token, sampled with the noise of its position."""
        asked = self.job.slice
        history = [*self.job.session.tokens, *self.tokens]
        return Draw(asked.sampling, history, asked.prompt_len, asked.stop_token_ids, asked.min_tokens)

    @property
    def missing(self) -> list[int]:
        """The tokens that the cache does not hold yet: at least the last, whose logits are wanted."""
        given, held = self.job.session.tokens, len(self.kept.cache.tokens)
        return [*given[held:], *self.tokens[max(0, held - len(given)) :]]

    def add(self, token: int, bucket: int) -> None:
        """One more token."""
        before = self.survival[-1] if self.survival else 1.0
        self.tokens.append(token)
        self.survival.append(before * self.calibration.chance(bucket))

    def settle(self) -> None:
        """Decide whether another token is wanted."""
        stopped = bool(self.tokens) and self.tokens[-1] in self.job.slice.stop_token_ids
        self.done = stopped or len(self.tokens) >= self.limit


class ModelStrategy:
    """Drafts with a `CausalModel`; how often it is right is learnt by tenant and workload."""

    def __init__(self, model: CausalModel) -> None:
        sampling.warm_up()
        guessing.warm_up()
        self._model = model
        self._kept: WeakKeyDictionary[DraftSession, _Session] = WeakKeyDictionary()
        self._calibrations: LastUsed[tuple[bytes, str], Calibration] = LastUsed(_calibration, _WORKLOADS)
        self._overall: LastUsed[bytes, Calibration] = LastUsed(_calibration, _WORKLOADS)

    def begin(self, jobs: Sequence[DraftJob]) -> list[Guess]:
        """See `Strategy.begin`."""
        return [self._begin(job) for job in jobs]

    def advance(self, guesses: Sequence[Guess]) -> None:
        """See `Strategy.advance`; while a long prompt is being fed, its guess gets no token."""
        going = [guess for guess in guesses if isinstance(guess, _ModelGuess)]
        fed = [(guess, guess.missing) for guess in going]
        drawing = [guess for guess, missing in fed if len(missing) <= _PREFILL_ROWS]
        logits = self._forward(fed)
        if not drawing:
            return
        outcomes, confidences = guess_tokens(logits, [guess.draw for guess in drawing], self._model.head)
        for guess, outcome, confidence in zip(drawing, outcomes, confidences, strict=True):
            self._extend(guess, outcome, confidence)

    def _begin(self, job: DraftJob) -> _ModelGuess:
        session, position = job.session, len(job.session.tokens)
        kept = self._kept.get(session)
        if kept is None:
            kept = self._kept[session] = _Session(self._model.new_cache(), Drafted())
        overall = self._overall.of(job.slice.key[0])
        calibration = self._calibrations.of((job.slice.key[0], job.workload), lambda: _calibration(overall))
        for bucket, accepted in kept.drafted.compare(session, agreement(kept.cache.tokens, session.tokens)):
            calibration.saw(bucket, accepted)
        # A token is guessed from the logits of the one before it, so the window must hold only that one.
        limit = max(0, min(job.k, self._model.info.context_window - position + 1))
        guess = _ModelGuess(job, kept=kept, calibration=calibration, limit=limit)
        for token, bucket in kept.drafted.ready(position, limit, _rules(job.slice)):
            guess.add(token, bucket)
        guess.settle()
        wanted = [*session.tokens, *guess.tokens]
        kept.cache.truncate(min(agreement(kept.cache.tokens, wanted), len(wanted) - 1))
        return guess

    def _forward(self, fed: Sequence[tuple[_ModelGuess, list[int]]]) -> Tensor:
        """Feed what is missing, or a part; of those with nothing missing then, logits [drawing, head]."""
        rows = [
            Rows(guess.kept.cache, missing[:_PREFILL_ROWS], int(len(missing) <= _PREFILL_ROWS))
            for guess, missing in fed
        ]
        try:
            return self._model.forward_head(rows)
        except BaseException:
            # How far the caches came is unknown.
            for guess, _ in fed:
                self._kept.pop(guess.job.session, None)
            raise

    def _extend(self, guess: _ModelGuess, outcome: Sampled | GalleyError, confidence: float) -> None:
        """Append the next token; an error ends this guess alone."""
        if isinstance(outcome, GalleyError):
            log_internal(outcome, session_id=guess.job.slice.key[1])
            self._kept.pop(guess.job.session, None)
            guess.error = outcome
            guess.done = True
            return
        bucket = _bucket(confidence, greedy=guess.job.slice.sampling.greedy)
        for token in outcome.tokens:  # one
            guess.kept.drafted.append(token, bucket)
            guess.add(token, bucket)
        guess.settle()


def _rules(asked: Slice) -> object:
    """What, beside the tokens before it, decides on a token."""
    return (asked.sampling, asked.prompt_len, asked.stop_token_ids, asked.min_tokens)


def _bucket(confidence: float, *, greedy: bool) -> int:
    """Where the likeliest token has this probability; greedy and sampled tokens are counted apart."""
    bucket = min(bisect(_EDGES, confidence), len(_CONFIDENCES)) - 1
    return bucket if greedy else bucket + len(_CONFIDENCES)


def _calibration(overall: Calibration | None = None) -> Calibration:
    prior = _CONFIDENCES * 2
    return Calibration(len(prior), prior, _STRENGTH, overall)

"""A small model of the target's tokenizer guesses, k steps ahead, all sessions of a step together.

It samples with the target's noise: same seed, same position, its own distribution, so that it guesses what
the target will sample (Daliri et al., arXiv 2408.07978). What it guessed beyond the confirmed tokens stays in
its cache; the next call keeps of it what came true.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from services.common.status import log_internal
from services.core.content import agreement
from services.core.errors import GalleyError
from services.core.step import Draw
from services.engine.model import Rows
from services.engine.sampling import draw_all, warm_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from services.core.step import Sampled
    from services.draft.strategies.base import DraftJob, DraftSession, Proposal
    from services.engine.model import CausalModel, SessionCache


@dataclass(slots=True)
class _Guess:
    """One session's proposal in the making."""

    job: DraftJob
    cache: SessionCache
    limit: int
    tokens: list[int] = field(default_factory=list)
    error: GalleyError | None = None

    @property
    def draw(self) -> Draw:
        """The next token, sampled with the noise of its position."""
        asked = self.job.slice
        return Draw(
            asked.sampling,
            [*self.job.session.tokens, *self.tokens],
            asked.prompt_len,
            asked.stop_token_ids,
            asked.min_tokens,
        )

    @property
    def open(self) -> bool:
        """Is another token wanted?"""
        if self.error is not None or len(self.tokens) >= self.limit:
            return False
        return not self.tokens or self.tokens[-1] not in self.job.slice.stop_token_ids


class ModelStrategy:
    """Drafts with a `CausalModel`."""

    def __init__(self, model: CausalModel) -> None:
        warm_up()
        self._model = model
        self._caches: WeakKeyDictionary[DraftSession, SessionCache] = WeakKeyDictionary()

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """See `Strategy.propose`."""
        guesses = [self._begin(job) for job in jobs]
        while going := [guess for guess in guesses if guess.open]:
            outcomes = draw_all(self._forward(going), [guess.draw for guess in going])
            for guess, outcome in zip(going, outcomes, strict=True):
                self._extend(guess, outcome)
        return [guess.error or guess.tokens for guess in guesses]

    def _begin(self, job: DraftJob) -> _Guess:
        cache = self._caches.get(job.session)
        if cache is None:
            cache = self._caches[job.session] = self._model.new_cache()
        confirmed = job.session.tokens
        # The last confirmed token is always fed: its logits are wanted.
        cache.truncate(min(agreement(cache.tokens, confirmed), len(confirmed) - 1))
        # A token is guessed from the logits of the one before it, so the window must hold only that one.
        room = self._model.info.context_window - len(confirmed) + 1
        return _Guess(job, cache, min(job.k, room))

    def _forward(self, going: list[_Guess]) -> Tensor:
        """The logits after all tokens of each guess: float32 [guesses, vocab]."""
        try:
            return torch.cat(self._model.forward([self._rows(guess) for guess in going]))
        except BaseException:
            # How far the caches came is unknown.
            for guess in going:
                self._caches.pop(guess.job.session, None)
            raise

    def _rows(self, guess: _Guess) -> Rows:
        missing = [*guess.job.session.tokens[len(guess.cache.tokens) :], *guess.tokens[-1:]]
        return Rows(guess.cache, missing, 1)

    def _extend(self, guess: _Guess, outcome: Sampled | GalleyError) -> None:
        """Append the next token; an error ends this guess alone."""
        if isinstance(outcome, GalleyError):
            log_internal(outcome, session_id=guess.job.slice.key[1])
            self._caches.pop(guess.job.session, None)
            guess.error = outcome
        else:
            guess.tokens += outcome.tokens

"""A small model of the target's tokenizer guesses, k steps ahead, all sessions of a step together.

It samples with the target's noise: same seed, same position, its own distribution, so that it guesses what
the target will sample (Daliri et al., arXiv 2408.07978). What it guessed beyond the confirmed tokens stays in
its cache; the next call keeps of it what came true.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from services.common.status import log_internal
from services.core.errors import GalleyError
from services.engine.model import Rows
from services.engine.sampling import SamplingContext, sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

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
    def open(self) -> bool:
        """Is another token wanted?"""
        if self.error is not None or len(self.tokens) >= self.limit:
            return False
        return not self.tokens or self.tokens[-1] not in self.job.slice.stop_token_ids


class ModelStrategy:
    """Drafts with a `CausalModel`."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._caches: WeakKeyDictionary[DraftSession, SessionCache] = WeakKeyDictionary()

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """See `Strategy.propose`."""
        guesses = [self._begin(job) for job in jobs]
        while going := [guess for guess in guesses if guess.open]:
            for guess, logits in zip(going, self._forward(going), strict=True):
                self._extend(guess, logits)
        return [guess.error or guess.tokens for guess in guesses]

    def _begin(self, job: DraftJob) -> _Guess:
        cache = self._caches.get(job.session)
        if cache is None:
            cache = self._caches[job.session] = self._model.new_cache()
        confirmed = job.session.tokens
        agree = next(
            (
                i
                for i, (ours, theirs) in enumerate(zip(cache.tokens, confirmed, strict=False))
                if ours != theirs
            ),
            min(len(cache.tokens), len(confirmed)),
        )
        # The last confirmed token is always fed: its logits are wanted.
        cache.truncate(min(agree, len(confirmed) - 1))
        # A token is guessed from the logits of the one before it, so the window must hold only that one.
        room = self._model.info.context_window - len(confirmed) + 1
        return _Guess(job, cache, min(job.k, room))

    def _forward(self, going: list[_Guess]) -> list[Tensor]:
        """The logits after all tokens of each guess: float32 [1, vocab]."""
        try:
            return self._model.forward([self._rows(guess) for guess in going])
        except BaseException:
            # How far the caches came is unknown.
            for guess in going:
                self._caches.pop(guess.job.session, None)
            raise

    def _rows(self, guess: _Guess) -> Rows:
        missing = [*guess.job.session.tokens[len(guess.cache.tokens) :], *guess.tokens[-1:]]
        return Rows(guess.cache, missing, 1)

    def _extend(self, guess: _Guess, logits: Tensor) -> None:
        """Sample the next token with the noise of its position; an error ends this guess alone."""
        asked = guess.job.slice
        tokens = [*guess.job.session.tokens, *guess.tokens]
        context = SamplingContext(
            asked.sampling, tokens, asked.prompt_len, asked.stop_token_ids, asked.min_tokens
        )
        try:
            guess.tokens += sample(logits, context, ())
        except GalleyError as error:
            log_internal(error, session_id=asked.key[1])
            self._caches.pop(guess.job.session, None)
            guess.error = error

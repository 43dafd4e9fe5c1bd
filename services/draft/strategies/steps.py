"""A model's steps over the caches of sessions: a token a step, all open guesses of a step together.

It samples with the target's noise: same seed, same position, its own distribution, so that it guesses what
the target will sample (Daliri et al., arXiv 2408.07978).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from weakref import WeakKeyDictionary

from torch import Tensor

from galley.common.logs import log_internal
from galley.common.wire.codec import Slice
from galley.core.content import common_prefix_len
from galley.core.errors import GalleyError
from galley.core.step import Draw, Sampled
from galley.engine.model import CausalModel, Rows, SessionCache
from galley.engine.sampler import guess as guess_tokens
from galley.engine.sampling import draw as sampling
from galley.engine.sampling import guessing
from services.draft.strategies.base import DraftJob, DraftSession, Guess

# Tokens of a session that one step feeds: a long prompt must not hold up the others for long.
_PREFILL_ROWS = 128
# Buckets of confidence lie between these; finer towards 1, where the chances of many tokens are multiplied.
_EDGES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)
CONFIDENCES = tuple((low + high) / 2 for low, high in pairwise(_EDGES))
"""What a bucket's confidence is about: those of greedy tokens; sampled ones are counted apart, after them."""


@dataclass(slots=True)
class SteppedGuess(Guess):
    """One session's proposal in the making: at most `limit` tokens, of which the model can guess `reach`."""

    cache: SessionCache = field(kw_only=True)
    reach: int = field(kw_only=True)
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
        given, held = self.job.session.tokens, len(self.cache.tokens)
        return [*given[held:], *self.tokens[max(0, held - len(given)) :]]

    def add(self, token: int, chance: float) -> None:
        """One more token, right with this chance if those before it are; then `settle`."""
        self.tokens.append(token)
        self.survival.append((self.survival[-1] if self.survival else 1.0) * chance)
        self.settle()

    def settle(self) -> None:
        """Decide whether another token is wanted."""
        stopped = bool(self.tokens) and self.tokens[-1] in self.job.slice.stop_token_ids
        self.done = stopped or len(self.tokens) >= self.limit


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the model says of the next token of a guess, and how sure it is: a bucket of CONFIDENCES."""

    guess: SteppedGuess
    token: int
    bucket: int


class ModelSteps:
    """One model; strategies that share it share its caches."""

    def __init__(self, model: CausalModel) -> None:
        sampling.warm_up()
        guessing.warm_up()
        self._model = model
        self._caches: WeakKeyDictionary[DraftSession, SessionCache] = WeakKeyDictionary()

    def open(self, job: DraftJob) -> SteppedGuess:
        """A guess without tokens, which is not settled yet."""
        cache = self._caches.get(job.session)
        if cache is None:
            cache = self._caches[job.session] = self._model.new_cache()
        # A token is guessed from the logits of the one before it, so the window must hold only that one.
        reach = max(0, self._model.info.context_window - len(job.session.tokens) + 1)
        return SteppedGuess(job, cache=cache, reach=reach, limit=min(job.k, reach))

    def cut_back(self, guess: SteppedGuess) -> None:
        """Keep of the cache what agrees with the guess, without its last token."""
        wanted = [*guess.job.session.tokens, *guess.tokens]
        guess.cache.truncate(min(common_prefix_len(guess.cache.tokens, wanted), len(wanted) - 1))

    def advance(self, guesses: Sequence[SteppedGuess]) -> list[Drawn]:
        """A step; a guess whose long prompt is still being fed is told nothing. An error ends its guess."""
        fed = [(guess, guess.missing) for guess in guesses]
        drawing = [guess for guess, missing in fed if len(missing) <= _PREFILL_ROWS]
        logits = self._forward(fed)
        if not drawing:
            return []
        outcomes, confidences = guess_tokens(logits, [guess.draw for guess in drawing], self._model.head)
        drawn = []
        for guess, outcome, confidence in zip(drawing, outcomes, confidences, strict=True):
            if isinstance(outcome, GalleyError):
                self._fail(guess, outcome)
            else:
                drawn.append(_drawn(guess, outcome, confidence))
        return drawn

    def _forward(self, fed: Sequence[tuple[SteppedGuess, list[int]]]) -> Tensor:
        """Feed what is missing, or a part; of those with nothing missing then, logits [drawing, head]."""
        rows = [
            Rows(guess.cache, missing[:_PREFILL_ROWS], int(len(missing) <= _PREFILL_ROWS))
            for guess, missing in fed
        ]
        try:
            return self._model.forward_head(rows)
        except BaseException:
            # How far the caches came is unknown.
            for guess, _ in fed:
                self._caches.pop(guess.job.session, None)
            raise

    def _fail(self, guess: SteppedGuess, error: GalleyError) -> None:
        log_internal(error, session_id=guess.job.slice.key[1])
        self._caches.pop(guess.job.session, None)
        guess.error = error
        guess.done = True


def rules_of(asked: Slice) -> object:
    """What, beside the tokens before it, decides on a token."""
    return (asked.sampling, asked.prompt_len, asked.stop_token_ids, asked.min_tokens)


def _drawn(guess: SteppedGuess, outcome: Sampled, confidence: float) -> Drawn:
    (token,) = outcome.tokens
    return Drawn(guess, token, _bucket(confidence, greedy=guess.job.slice.sampling.greedy))


def _bucket(confidence: float, *, greedy: bool) -> int:
    """Where the likeliest token has this probability."""
    bucket = min(bisect(_EDGES, confidence), len(CONFIDENCES)) - 1
    return bucket if greedy else bucket + len(CONFIDENCES)

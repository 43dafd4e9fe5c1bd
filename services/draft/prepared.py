"""What sessions would be proposed if their guesses are refused, made ready while the draft has nothing to do.

While a verdict is awaited, the likeliest outcomes beside the one that was guessed, over all sessions, are
guessed on from as one batch (Kumar, Dao, May, "Speculative Speculative Decoding", arXiv 2603.03251): the
guesses are right up to a doubtful one, and the runner-up stands in its place. What was prepared is found by
the tokens before it, so that no token depends on it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from services.draft.strategies.base import DraftJob, Preparing, rules_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from services.common.slices import Slice
    from services.draft.strategies.base import Doubt, DraftSession, Guess, Strategy

MOST_OUTCOMES = 2
"""Of a session, at a time."""
MOST_TOKENS = 4
"""Of an outcome."""
# An outcome that is less likely is not worth a row of a step.
_LEAST_CHANCE = 0.02


@dataclass(frozen=True, slots=True)
class PreparedCounts:
    """Tokens prepared; those that items were answered with; and those forgotten."""

    prepared: int
    used: int
    wasted: int


@dataclass(frozen=True, slots=True)
class _Awaited:
    """What a session, which it does not keep, was proposed last."""

    strategy: str
    slice: Slice
    workload: str

    def job(self, session: DraftSession) -> DraftJob:
        """Guess no more, as the guesses stand."""
        return DraftJob(self.slice, session, 0, self.workload)


@dataclass(frozen=True, slots=True)
class _Branch:
    """An outcome, and what was guessed after it; it does not keep the session that it is of."""

    strategy: str
    guess: Guess

    @property
    def tokens(self) -> list[int]:
        """Those of the session in that outcome."""
        return self.guess.job.session.tokens

    def is_of(self, doubt: Doubt) -> bool:
        """Is it this outcome?"""
        return (len(self.tokens) - 1, self.tokens[-1]) == (doubt.position, doubt.token)

    def ready(self, strategy: str, job: DraftJob) -> int:
        """How many of its guesses are what this job would guess."""
        further = job.session.tokens[len(self.tokens) :]
        came_true = job.session.tokens == [*self.tokens, *self.guess.tokens[: len(further)]]
        same = strategy == self.strategy and rules_of(job.slice) == rules_of(self.guess.job.slice)
        if not (came_true and same) or self.guess.error is not None:
            return 0
        return min(job.k, len(self.guess.tokens) - len(further))

    def possible(self, session: DraftSession) -> bool:
        """Is there something, and do the session's tokens lead there still?"""
        before = len(self.tokens) - 1
        return (
            bool(self.guess.tokens)
            and session.confirmed <= before
            and session.tokens[:before] == self.tokens[:before]
        )


class Preparation:
    """Of all sessions of a drafter, `most` outcomes a step; none where that is 0."""

    def __init__(self, strategies: Mapping[str, Strategy], most: int) -> None:
        self._able = {name: one for name, one in strategies.items() if isinstance(one, Preparing)}
        self._most = most
        self._awaited: WeakKeyDictionary[DraftSession, _Awaited] = WeakKeyDictionary()
        self._branches: WeakKeyDictionary[DraftSession, list[_Branch]] = WeakKeyDictionary()
        self._prepared = 0
        self._used = 0

    @property
    def counts(self) -> PreparedCounts:
        """Since the start."""
        held = sum(len(one.guess.tokens) for branches in self._branches.values() for one in branches)
        return PreparedCounts(self._prepared, self._used, self._prepared - self._used - held)

    @property
    def wanted(self) -> bool:
        """Is there anything to prepare?"""
        return bool(self._awaited or self._going)

    def expect(self, strategy: str, job: DraftJob) -> None:
        """The job is answered with guesses of this strategy, and the verdict awaited."""
        if self._most and strategy in self._able:
            self._awaited[job.session] = _Awaited(strategy, job.slice, job.workload)

    def resume(self, strategy: str, job: DraftJob) -> None:
        """The session is back, with the job's tokens; to be called before the strategy begins with it."""
        self._awaited.pop(job.session, None)
        branches = self._branches.pop(job.session, [])
        came = next((one for one in branches if one.ready(strategy, job)), None)
        if came is not None:
            self._used += came.ready(strategy, job)
            self._able[strategy].adopt(job, came.guess)
        possible = [one for one in branches if one is not came and one.possible(job.session)]
        for one in possible:
            one.guess.done = True  # it went by what was known of the session before
        if possible:
            self._branches[job.session] = possible

    def step(self) -> bool:
        """One step of the outcomes under way, or of the next likeliest; may there be more?"""
        going = self._going or self._begin()
        by_strategy: dict[str, list[Guess]] = defaultdict(list)
        for one in going:
            if not one.guess.done:
                by_strategy[one.strategy].append(one.guess)
        for name, guesses in by_strategy.items():
            before = sum(len(guess.tokens) for guess in guesses)
            self._able[name].advance(guesses)
            self._prepared += sum(len(guess.tokens) for guess in guesses) - before
        return bool(going or self._awaited)

    def clear(self) -> None:
        """Forget all of it."""
        self._awaited.clear()
        self._branches.clear()

    @property
    def _going(self) -> list[_Branch]:
        """Those under way, which go with their sessions."""
        return [one for branches in self._branches.values() for one in branches if not one.guess.done]

    def _begin(self) -> list[_Branch]:
        likeliest = nlargest(self._most, self._candidates(), key=lambda found: found[1].chance)
        begun = (self._branch(session, doubt) for session, doubt in likeliest)
        return [one for one in begun if one is not None]

    def _candidates(self) -> Iterator[tuple[DraftSession, Doubt]]:
        """What may be prepared; sessions of which nothing may are awaited no more."""
        for session, awaited in list(self._awaited.items()):
            doubts = self._doubts(session, awaited)
            if not doubts:
                del self._awaited[session]
            for doubt in doubts:
                yield session, doubt

    def _doubts(self, session: DraftSession, awaited: _Awaited) -> list[Doubt]:
        begun = self._branches.get(session, [])
        if len(begun) >= MOST_OUTCOMES:
            return []
        asked = awaited.slice
        fresh = [
            doubt
            for doubt in self._able[awaited.strategy].doubts(awaited.job(session))
            if doubt.chance >= _LEAST_CHANCE
            and doubt.token not in asked.stop_token_ids
            and _room_after(asked, doubt) > 0
            and not any(one.is_of(doubt) for one in begun)
        ]
        return nlargest(MOST_OUTCOMES - len(begun), fresh)

    def _branch(self, session: DraftSession, doubt: Doubt) -> _Branch | None:
        awaited = self._awaited.get(session)
        if awaited is None:
            return None
        k = min(MOST_TOKENS, _room_after(awaited.slice, doubt))
        guess = self._able[awaited.strategy].branch(awaited.job(session), doubt, k)
        if guess is None:
            del self._awaited[session]
            return None
        branch = _Branch(awaited.strategy, guess)
        self._branches.setdefault(session, []).append(branch)
        self._prepared += len(guess.tokens)
        return branch


def _room_after(asked: Slice, doubt: Doubt) -> int:
    """How many tokens a proposal may have in that outcome: see `Drafter`."""
    return asked.max_position - doubt.position - 2

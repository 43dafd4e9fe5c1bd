"""The draft's step: open the new items, advance the open guesses by one token, answer what is done.

An item is open from the step that takes it until it is answered or given up. At most one of a session is
open: a newer one overtakes it. Of more than a step takes, the oldest go first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from galley.common.logs import log_internal
from galley.common.wire.codec import Slice
from galley.core.content import Miss, SessionKey, look_up, prefix_hash
from galley.core.errors import Broken, GalleyError
from galley.core.scheduler.messages import Superseded
from services.draft.session_table import SessionTable
from services.draft.strategies.base import DraftJob, DraftSession, Guess, Strategy


@dataclass(frozen=True, slots=True)
class ProposeJob:
    """A validated item: at most `k` tokens by the strategy of this name, which is offered.

    The last `ahead` tokens up to the slice's end are not confirmed yet.
    """

    slice: Slice
    k: int
    strategy: str
    ahead: int = 0
    workload: str = ""


@dataclass(frozen=True, slots=True)
class Proposed:
    """Guesses for positions [position, position + len), after a prefix of this hash."""

    position: int
    prefix_hash: bytes
    draft_tokens: tuple[int, ...]
    survival: tuple[float, ...]
    kv_len: int


# An error is the outcome of its own job alone.
ProposeOutcome: TypeAlias = "Proposed | Miss | Superseded | GalleyError"


@dataclass(slots=True)
class Stepped:
    """What was done, by item: answers, and what is ready of those that took part and are open still."""

    answers: dict[int, ProposeOutcome] = field(default_factory=dict)
    so_far: dict[int, Proposed] = field(default_factory=dict)


@dataclass(slots=True)
class DraftCounts:
    """Tokens drafted by the items that have ended; `wasted` of them no answer held."""

    drafted: int = 0
    wasted: int = 0


@dataclass(slots=True)
class _Open:
    """An item under way; `hash` is that of the tokens that it builds on."""

    item: int
    strategy: str
    job: DraftJob
    hash: bytes
    guess: Guess

    @property
    def ended(self) -> bool:
        """Is there nothing to wait for?"""
        return self.guess.done or self.guess.error is not None

    @property
    def so_far(self) -> Proposed:
        """What is ready."""
        position, k = self.job.slice.position, self.job.k
        tokens, survival = tuple(self.guess.tokens[:k]), tuple(self.guess.survival[:k])
        return Proposed(position, self.hash, tokens, survival, kv_len=position)


class Drafter:
    """Sessions' tokens and the strategies that guess how they go on; used by one thread at a time."""

    def __init__(
        self, strategies: Mapping[str, Strategy], *, max_sessions: int, max_tokens: int, max_batch: int
    ) -> None:
        """Of `max_sessions` sessions, `max_tokens` tokens are kept; a step advances `max_batch` guesses."""
        self.counts = DraftCounts()
        self._strategies = strategies
        self._max_batch = max_batch
        self._sessions: SessionTable[DraftSession] = SessionTable(
            DraftSession, max_sessions=max_sessions, max_tokens=max_tokens
        )
        self._open: dict[int, _Open] = {}  # the oldest first
        self._standing: dict[SessionKey, _Open] = {}

    def open(self, new: Mapping[int, ProposeJob], ended: Mapping[int, int]) -> Stepped:
        """Take the items `new`, which are named by rising numbers, and let their strategies begin.

        `ended` have been given up, or answered with so many of the tokens that they had.
        """
        stepped = Stepped()
        for item, used in ended.items():
            if item in self._open:
                self._close(self._open[item], used)
        for item, job in new.items():
            self._admit(item, job, stepped)
        fresh = [self._open[item] for item in new if item in self._open]
        self._run(fresh, self._begin)
        self._conclude(fresh, stepped)
        return stepped

    def advance(self) -> Stepped:
        """One step of the oldest open items, as many as it takes."""
        stepped, taking = Stepped(), self._next()
        self._run(taking, self._advance)
        self._conclude(taking, stepped)
        return stepped

    def _next(self) -> list[_Open]:
        return list(islice(self._open.values(), self._max_batch))

    def waste(self, tokens: int) -> None:
        """So many of an answer were of no use after all: nobody waited for it any more."""
        self.counts.wasted += tokens

    def _admit(self, item: int, job: ProposeJob, stepped: Stepped) -> None:
        """Let it stand for its session, whose tokens are set to its own, or answer why it cannot."""
        asked = job.slice
        if (before := self._standing.get(asked.key)) is not None:
            stepped.answers[before.item] = Superseded(before.job.slice.position, before.hash)
            self._close(before)
        session = self._sessions.peek(asked.key)
        found = look_up(session.tokens if session else (), asked.start, asked.tokens, asked.prefix_hash)
        if isinstance(found, Miss):
            stepped.answers[item] = found
            return
        # The target takes no draft token for the last position: its own stands there.
        k = min(job.k, asked.max_position - asked.position - 1)
        try:
            session = self._sessions.admit(asked.key, asked.position + k, self._standing)
        except GalleyError as overloaded:
            stepped.answers[item] = overloaded
            return
        session.tokens[asked.start :] = asked.tokens
        session.confirmed = asked.position - job.ahead
        own = DraftJob(asked, session, k, job.workload)
        one = _Open(item, job.strategy, own, prefix_hash(session.tokens), Guess(own))
        self._open[item] = self._standing[asked.key] = one

    def _run(self, group: Sequence[_Open], work: Callable[[Strategy, Sequence[_Open]], None]) -> None:
        """What fails as a whole fails for the items of this strategy alone."""
        by_strategy: dict[str, list[_Open]] = defaultdict(list)
        for one in group:
            by_strategy[one.strategy].append(one)
        for name, mine in by_strategy.items():
            try:
                work(self._strategies[name], mine)
            except Exception as error:  # noqa: BLE001  # a strategy is a plug-in: whatever it does stays here
                log_internal(error, strategy=name)
                for one in mine:
                    one.guess.error = error if isinstance(error, GalleyError) else Broken(f"{name} failed")

    @staticmethod
    def _begin(strategy: Strategy, mine: Sequence[_Open]) -> None:
        for one, guess in zip(mine, strategy.begin([one.job for one in mine]), strict=True):
            one.guess = guess

    @staticmethod
    def _advance(strategy: Strategy, mine: Sequence[_Open]) -> None:
        strategy.advance([one.guess for one in mine])

    def _conclude(self, group: Sequence[_Open], stepped: Stepped) -> None:
        """Answer those that have ended, and say how far the others have come."""
        for one in group:
            if not one.ended:
                stepped.so_far[one.item] = one.so_far
                continue
            outcome = stepped.answers[one.item] = one.guess.error or one.so_far
            self._close(one, len(outcome.draft_tokens) if isinstance(outcome, Proposed) else 0)

    def _close(self, one: _Open, used: int = 0) -> None:
        """It is open no more; `used` of its tokens were in its answer."""
        del self._open[one.item]
        if self._standing.get(one.job.slice.key) is one:
            del self._standing[one.job.slice.key]
        self.counts.drafted += len(one.guess.tokens)
        self.counts.wasted += max(0, len(one.guess.tokens) - used)

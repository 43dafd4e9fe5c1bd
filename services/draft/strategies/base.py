"""What every draft strategy is: from a session's tokens to guesses of the next ones, a step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from galley.common.wire.codec import Slice
from galley.core.errors import GalleyError


class DraftSession:
    """The tokens of one session, from absolute position 0; strategies hang what they keep on it.

    The first `confirmed` of them the target has confirmed; the rest are guesses that it has not answered yet,
    and may be replaced. Compared and hashed by identity, so that a strategy can keep its own state in a
    WeakKeyDictionary: it is gone with the session.
    """

    __slots__ = ("__weakref__", "confirmed", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.confirmed = 0


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Guess at most `k` tokens after `session.tokens`, which are those up to the end of `slice`."""

    slice: Slice
    session: DraftSession
    k: int
    workload: str = ""


@dataclass(slots=True)
class Guess:
    """A proposal in the making: at most `job.k` tokens, good for use as far as it has come.

    `survival[i]` is the estimated chance that tokens 0 to i are all accepted if those before them are: as
    many as tokens, never rising.
    An error is the outcome of its own job alone. Strategies hang on it what they need by subclassing.
    """

    job: DraftJob
    tokens: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    done: bool = False
    error: GalleyError | None = None


class Strategy(Protocol):
    """Called from one thread, one step at a time."""

    def begin(self, jobs: Sequence[DraftJob]) -> list[Guess]:
        """A guess for each job, all of different sessions, in order; those that need no step are done."""

    def advance(self, guesses: Sequence[Guess]) -> None:
        """One more step for each of these, none of them done: usually a token each, computed together.

        Which guesses share a step changes from call to call; one that is given up is not advanced again.
        """

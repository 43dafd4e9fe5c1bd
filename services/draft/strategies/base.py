"""What every draft strategy is: from confirmed tokens to guesses of the next ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.common.slices import Slice
    from services.core.errors import GalleyError


class DraftSession:
    """The confirmed tokens of one session, from absolute position 0; strategies hang what they keep on it.

    Compared and hashed by identity, so that a strategy can keep its own state in a WeakKeyDictionary: it is
    gone with the session.
    """

    __slots__ = ("__weakref__", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Guess at most `k` tokens after `session.tokens`, which are those up to the end of `slice`."""

    slice: Slice
    session: DraftSession
    k: int


# The guesses, at most k; an error is the outcome of its own job alone.
Proposal: TypeAlias = "list[int] | GalleyError"


class Strategy(Protocol):
    """Called from one thread, one step at a time."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """The proposal of each job, all of different sessions, in order."""

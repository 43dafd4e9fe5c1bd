"""Hints: draft tokens anchored by position and content, which keep their worth when they come late.

A hint for positions [p, p + n) after a prefix of hash h is of use to a session that stands at s >= p iff its
own tokens [0, p) have that hash and its own [p, s) are the hint's first: then the rest is for position s on.

A draft that copies is often wrong in one token alone, and then the rest, by position, is still right. So a
hint outlives a refused token (it is *shaken*), until the next one says whether it has recovered. A guess is a
guess, and changes nothing but speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from galley.core.content import PrefixHasher

# Of one hint: what is bounded is memory, for a pass verifies what pays.
MAX_HINT_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Hint:
    """Draft tokens from `position` on, after a prefix of this hash.

    `survival[i]`, where given, is the estimated chance that tokens 0 to i are all accepted.
    """

    position: int
    prefix_hash: bytes
    draft_tokens: tuple[int, ...]
    survival: tuple[float, ...] = ()

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.position + len(self.draft_tokens)

    def chance(self, index: int) -> float | None:
        """Of this token, given that all before it are accepted; None if that is not said."""
        if not self.survival:
            return None
        before = self.survival[index - 1] if index else 1.0
        return min(1.0, self.survival[index] / before) if before > 0.0 else 0.0

    def tail(self, passed: int, *, after_mismatch: bool = False) -> HintTail:
        """What it offers once its first `passed` tokens have been and gone."""
        survival = self.survival
        if passed and survival:
            # The chance of all that is left, given that the first have survived.
            sure = survival[passed - 1]
            survival = tuple(min(1.0, chance / sure) if sure > 0.0 else 0.0 for chance in survival[passed:])
        return HintTail(self.draft_tokens[passed:], survival, after_mismatch)


@dataclass(frozen=True, slots=True)
class HintTail:
    """What a hint offers at the session's present position; `survival` is given that it agreed so far.

    `shaken`: the token just before was not the hint's.
    """

    draft_tokens: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    after_mismatch: bool = False


NOTHING = HintTail()


class HintObserver(Protocol):
    """Learns how good hints are from what was confirmed, whether it was verified or not."""

    def record_token(self, *, right: bool, predicted: float | None) -> None:
        """The next token of a hint that was right so far was right, or was not: with the chance `told`?"""

    def record_recovery(self, *, right: bool) -> None:
        """The token after a wrong one was right, or was not."""


class PendingHint:
    """A session's hint, followed while the session grows."""

    __slots__ = ("_after_mismatch", "_anchored", "_followed", "_observer", "hint", "is_exhausted")

    def __init__(self, hint: Hint, listener: HintObserver, *, anchored: bool = False) -> None:
        """`rooted`: the prefix is known to agree, so that nothing need be hashed."""
        self.hint = hint
        self.is_exhausted = not hint.draft_tokens
        self._observer = listener
        self._anchored = anchored
        self._followed = 0
        self._after_mismatch = False

    def follow(self, tokens: Sequence[int], hasher: PrefixHasher) -> HintTail:
        """What is left of it for a session of these confirmed tokens, which only grow from call to call.

        Nothing while the session has not come to its anchor; once it disagrees for good or is used up it is
        `useless`.
        """
        passed = len(tokens) - self.hint.position
        if self.is_exhausted or passed < 0:
            return NOTHING
        self.is_exhausted = not (
            self._has_root(tokens, hasher)
            and self._holds(tokens, passed)
            and passed < len(self.hint.draft_tokens)
        )
        return NOTHING if self.is_exhausted else self.hint.tail(passed, after_mismatch=self._after_mismatch)

    def _has_root(self, tokens: Sequence[int], hasher: PrefixHasher) -> bool:
        if not self._anchored:
            self._anchored = hasher.digest(tokens, self.hint.position) == self.hint.prefix_hash
        return self._anchored

    def _holds(self, tokens: Sequence[int], passed: int) -> bool:
        """Has it agreed with the tokens since the anchor, but for single ones?"""
        guesses, anchor = self.hint.draft_tokens, self.hint.position
        while self._followed < min(passed, len(guesses)):
            agrees = tokens[anchor + self._followed] == guesses[self._followed]
            self._followed += 1
            if self._after_mismatch:
                self._observer.record_recovery(right=agrees)
            else:
                self._observer.record_token(right=agrees, predicted=self.hint.chance(self._followed - 1))
            if self._after_mismatch and not agrees:
                return False
            self._after_mismatch = not agrees
        return True

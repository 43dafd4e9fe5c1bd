"""Hints: draft tokens anchored by position and content, so that they stay useful when they arrive late.

A hint for positions [p, p + n) after a prefix of hash h serves a session at position s >= p iff the session's
tokens [0, p) have that hash and its tokens [p, s) equal the hint's first ones. The rest of the hint is then
for positions from s on.

A draft that copies is often wrong in one token alone, and right again after it. So a hint survives one wrong
token; `after_mismatch` marks its rest until the next token shows whether it has recovered. Hints change only
speed, never tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from galley.core.content import PrefixHasher

# Draft tokens in one hint: bounds memory. How many a step verifies depends on their cost.
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
        """The position after the last token."""
        return self.position + len(self.draft_tokens)

    def chance(self, index: int) -> float | None:
        """Return the chance of this token if all before it are accepted; None if unknown."""
        if not self.survival:
            return None
        before = self.survival[index - 1] if index else 1.0
        return min(1.0, self.survival[index] / before) if before > 0.0 else 0.0

    def tail(self, passed: int, *, after_mismatch: bool = False) -> HintTail:
        """Return the part after the first `passed` tokens, which are confirmed.

        `after_mismatch`: the token before it was not the hint's.
        """
        survival = self.survival
        if passed and survival:
            # The chance of all that is left, given that the first have survived.
            sure = survival[passed - 1]
            survival = tuple(min(1.0, chance / sure) if sure > 0.0 else 0.0 for chance in survival[passed:])
        return HintTail(self.draft_tokens[passed:], survival, after_mismatch)


@dataclass(frozen=True, slots=True)
class HintTail:
    """The part of a hint that follows the confirmed tokens."""

    draft_tokens: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    after_mismatch: bool = False


NOTHING = HintTail()


class HintObserver(Protocol):
    """Learns from confirmed tokens how good hints are, verified or not."""

    def record_token(self, *, right: bool, predicted: float | None) -> None:
        """Record the next token of a hint that was right so far; `predicted` is the draft's chance."""

    def record_recovery(self, *, right: bool) -> None:
        """Record whether the token after a wrong one was right."""


class PendingHint:
    """The hint of a session, advanced while the session grows."""

    __slots__ = ("_after_mismatch", "_anchored", "_followed", "_observer", "hint", "is_exhausted")

    def __init__(self, hint: Hint, listener: HintObserver, *, anchored: bool = False) -> None:
        """Take a hint. `anchored`: its prefix is known to agree, so it need not be hashed."""
        self.hint = hint
        self.is_exhausted = not hint.draft_tokens
        self._observer = listener
        self._anchored = anchored
        self._followed = 0
        self._after_mismatch = False

    def follow(self, tokens: Sequence[int], hasher: PrefixHasher) -> HintTail:
        """Return the part left for a session of these confirmed tokens, which only grow.

        Return nothing before the session reaches the anchor. Set `is_exhausted` once the hint disagrees for
        good or is used up.
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
        """Return True if the hint has agreed with the tokens since its anchor, except for single ones."""
        draft_tokens, anchor = self.hint.draft_tokens, self.hint.position
        while self._followed < min(passed, len(draft_tokens)):
            agrees = tokens[anchor + self._followed] == draft_tokens[self._followed]
            self._followed += 1
            if self._after_mismatch:
                self._observer.record_recovery(right=agrees)
            else:
                self._observer.record_token(right=agrees, predicted=self.hint.chance(self._followed - 1))
            if self._after_mismatch and not agrees:
                return False
            self._after_mismatch = not agrees
        return True

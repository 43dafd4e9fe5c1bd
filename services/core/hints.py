"""Hints: draft tokens anchored by position and content, which keep their worth when they come late.

A hint for positions [p, p + n) after a prefix of hash h is of use to a session that stands at s >= p iff its
own tokens [0, p) have that hash and its own [p, s) are the hint's first: then the rest is for position s on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.core.content import PrefixHasher


@dataclass(frozen=True, slots=True)
class Hint:
    """Draft tokens from `position` on, after a prefix of this hash.

    `survival[i]`, where given, is the estimated chance that tokens 0 to i are all accepted.
    """

    position: int
    prefix_hash: bytes
    draft_tokens: tuple[int, ...]
    survival: tuple[float, ...] = ()

    def after(self, passed: int) -> Rest:
        """What it offers once its first `passed` tokens have come true."""
        if not passed:
            return Rest(self.draft_tokens, self.survival)
        survival = self.survival
        if survival:
            # The chance of all that is left, given that the first have survived.
            sure = survival[passed - 1]
            survival = tuple(min(1.0, chance / sure) if sure > 0.0 else 0.0 for chance in survival[passed:])
        return Rest(self.draft_tokens[passed:], survival)


@dataclass(frozen=True, slots=True)
class Rest:
    """What a hint offers at the session's present position; `survival` is given that it agreed so far."""

    draft_tokens: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()


NOTHING = Rest()


class PendingHint:
    """A session's hint, followed while the session grows."""

    __slots__ = ("_agreed", "_hint", "_rooted", "useless")

    def __init__(self, hint: Hint, *, rooted: bool = False) -> None:
        """`rooted`: the prefix is known to agree, so that nothing need be hashed."""
        self._hint = hint
        self._rooted = rooted
        self._agreed = 0
        self.useless = not hint.draft_tokens

    def follow(self, tokens: Sequence[int], hasher: PrefixHasher) -> Rest:
        """What is left of it for a session of these confirmed tokens, which only grow from call to call.

        Nothing while the session has not come to its anchor; once it disagrees or is used up it is `useless`.
        """
        passed = len(tokens) - self._hint.position
        if self.useless or passed < 0:
            return NOTHING
        self.useless = not (self._has_root(tokens, hasher) and self._agrees(tokens, passed))
        if self.useless:
            return NOTHING
        return self._hint.after(passed)

    def _has_root(self, tokens: Sequence[int], hasher: PrefixHasher) -> bool:
        if not self._rooted:
            self._rooted = hasher.of(tokens, self._hint.position) == self._hint.prefix_hash
        return self._rooted

    def _agrees(self, tokens: Sequence[int], passed: int) -> bool:
        """Are the `passed` tokens since the anchor the hint's own, and is something left?"""
        if passed >= len(self._hint.draft_tokens):
            return False
        anchor = self._hint.position
        for i in range(self._agreed, passed):
            if tokens[anchor + i] != self._hint.draft_tokens[i]:
                return False
        self._agreed = passed
        return True

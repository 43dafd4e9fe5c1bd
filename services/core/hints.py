"""Hints: draft tokens anchored by position and content, which keep their worth when they come late.

A hint for positions [p, p + n) after a prefix of hash h is of use to a session that stands at s >= p iff its
own tokens [0, p) have that hash and its own [p, s) are the hint's first: then the rest is for position s on.

A draft that copies is often wrong in one token alone, and then the rest, by position, is still right. So a
hint outlives a refused token (it is *shaken*), until the next one says whether it has recovered. How likely
that is, is measured (`Recovery`); a guess is a guess, and changes nothing but speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.core.content import PrefixHasher


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

    def after(self, passed: int, *, shaken: bool = False) -> Rest:
        """What it offers once its first `passed` tokens have been and gone."""
        survival = self.survival
        if passed and survival:
            # The chance of all that is left, given that the first have survived.
            sure = survival[passed - 1]
            survival = tuple(min(1.0, chance / sure) if sure > 0.0 else 0.0 for chance in survival[passed:])
        return Rest(self.draft_tokens[passed:], survival, shaken)


@dataclass(frozen=True, slots=True)
class Rest:
    """What a hint offers at the session's present position; `survival` is given that it agreed so far.

    `shaken`: the token just before was not the hint's.
    """

    draft_tokens: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    shaken: bool = False


NOTHING = Rest()


class Recovery:
    """The chance that a shaken hint is right again at the next token, as a session has shown it."""

    __slots__ = ("chance",)

    PRIOR = 0.25
    WEIGHT = 0.15

    def __init__(self) -> None:
        self.chance = self.PRIOR

    def saw(self, *, recovered: bool) -> None:
        """The token after a refused one was the hint's, or was not."""
        self.chance += self.WEIGHT * (recovered - self.chance)


class PendingHint:
    """A session's hint, followed while the session grows."""

    __slots__ = ("_followed", "_recovery", "_rooted", "_shaken", "hint", "useless")

    def __init__(self, hint: Hint, recovery: Recovery, *, rooted: bool = False) -> None:
        """`rooted`: the prefix is known to agree, so that nothing need be hashed."""
        self.hint = hint
        self.useless = not hint.draft_tokens
        self._recovery = recovery
        self._rooted = rooted
        self._followed = 0
        self._shaken = False

    def follow(self, tokens: Sequence[int], hasher: PrefixHasher) -> Rest:
        """What is left of it for a session of these confirmed tokens, which only grow from call to call.

        Nothing while the session has not come to its anchor; once it disagrees for good or is used up it is
        `useless`.
        """
        passed = len(tokens) - self.hint.position
        if self.useless or passed < 0:
            return NOTHING
        self.useless = not (
            self._has_root(tokens, hasher)
            and self._holds(tokens, passed)
            and passed < len(self.hint.draft_tokens)
        )
        return NOTHING if self.useless else self.hint.after(passed, shaken=self._shaken)

    def _has_root(self, tokens: Sequence[int], hasher: PrefixHasher) -> bool:
        if not self._rooted:
            self._rooted = hasher.of(tokens, self.hint.position) == self.hint.prefix_hash
        return self._rooted

    def _holds(self, tokens: Sequence[int], passed: int) -> bool:
        """Has it agreed with the tokens since the anchor, but for single ones?"""
        guesses, anchor = self.hint.draft_tokens, self.hint.position
        while self._followed < min(passed, len(guesses)):
            agrees = tokens[anchor + self._followed] == guesses[self._followed]
            if self._shaken:
                self._recovery.saw(recovered=agrees)
                if not agrees:
                    return False
            self._shaken = not agrees
            self._followed += 1
        return True


def spliced(new: Hint, old: Hint, chance: float) -> Hint:
    """The new hint, and beyond its end what the old one says there: right with this chance.

    A draft that is asked afresh after a refused token answers late on a slow link; the old hint bridges it.
    """
    tail = old.draft_tokens[max(0, new.end - old.position) :] if old.position <= new.end else ()
    if not tail or not new.draft_tokens:
        return new
    survival = new.survival
    if survival:
        survival += tuple(survival[-1] * chance for _ in tail)
    return Hint(new.position, new.prefix_hash, new.draft_tokens + tail, survival)

"""Hints: draft tokens anchored by position and content, so that they stay useful when they arrive late.

A hint for positions [p, p + n) after a prefix of hash h serves a session at position s >= p iff the session's
tokens [0, p) have that hash and its tokens [p, s) equal the hint's first ones. A draft that copies is often
wrong in one token alone. So a hint survives a wrong token if its next one is right; until that is known,
`after_mismatch` marks the rest of the hint. Hints change only speed, never tokens.
"""

from __future__ import annotations

from galley.core.names import LOCAL_SOURCES
from galley.core.trees import CHAIN, Parents
from galley.core.values import value

# Most draft tokens in one hint, to bound memory. A step verifies as many of them as pay.
MAX_HINT_TOKENS = 256
# Most draft tokens in a round; targets and drafts have limits of their own.
MAX_DRAFT_TOKENS = 64


@value
class Hint:
    """Draft tokens from `position` on, after a prefix of this hash.

    `survival[i]`, where given, is the estimated chance that token i and all before it on its path are
    accepted. `sources[i]` is what proposed token i; only the gateway knows it. `parents`: see `trees`.
    """

    position: int
    prefix_hash: bytes
    draft_tokens: tuple[int, ...]
    survival: tuple[float, ...] = ()
    sources: tuple[str, ...] = ()
    parents: Parents = CHAIN

    @property
    def end(self) -> int:
        return self.position + len(self.draft_tokens)

    def is_local(self, index: int) -> bool:
        """Return True if the session itself proposed this token, not a draft."""
        return index < len(self.sources) and self.sources[index] in LOCAL_SOURCES

    def chance(self, index: int) -> float | None:
        """Return the chance of this token if all before it are accepted; None if unknown."""
        if not self.survival:
            return None
        before = self.survival[index - 1] if index else 1.0
        return min(1.0, self.survival[index] / before) if before > 0.0 else 0.0

    def tail(self, passed: int, *, after_mismatch: bool = False) -> HintTail:
        """Return the part after `passed` confirmed tokens; `after_mismatch`: the hint had the last wrong."""
        return HintTail(self.draft_tokens, self.survival, after_mismatch, self.sources).after(passed)


@value
class HintTail:
    draft_tokens: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    after_mismatch: bool = False
    sources: tuple[str, ...] = ()

    def first(self, count: int) -> HintTail:
        return HintTail(
            self.draft_tokens[:count], self.survival[:count], self.after_mismatch, self.sources[:count]
        )

    def after(self, count: int) -> HintTail:
        """Return what follows the first `count` tokens if these are accepted."""
        survival = self.survival
        if count and survival:
            # The first ones have survived, so the chances of the others are conditional on that.
            sure = survival[count - 1]
            survival = tuple(min(1.0, chance / sure) if sure > 0.0 else 0.0 for chance in survival[count:])
        return HintTail(self.draft_tokens[count:], survival, self.after_mismatch, self.sources[count:])

    @property
    def first_source(self) -> str:
        return self.sources[0] if self.sources else ""

    @property
    def last_source(self) -> str:
        return self.sources[-1] if self.sources else ""


NOTHING = HintTail()

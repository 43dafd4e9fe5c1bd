"""Hints: draft tokens anchored by position and content, so that they stay useful when they arrive late.

A hint for positions [p, p + n) after a prefix of hash h serves a session at position s >= p iff the session's
tokens [0, p) have that hash and its tokens [p, s) equal the hint's first ones. A draft that copies is often
wrong in one token alone. So a hint survives a wrong token if its next one is right; until that is known,
`after_mismatch` marks the rest of the hint. Hints change only speed, never tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from galley.core.names import LOCAL_SOURCES
from galley.core.trees import CHAIN, ROOT, Parents, follow, main_path, simplified, subtree
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
        """Return the position after its likeliest tokens, the main path."""
        count = len(self.draft_tokens)
        return self.position + (len(main_path(self.parents, count)) if self.parents else count)

    def is_local(self, index: int) -> bool:
        """Return True if the session itself proposed this token, not a draft."""
        return index < len(self.sources) and self.sources[index] in LOCAL_SOURCES

    def chance(self, index: int) -> float | None:
        """Return the chance of this token if all before it on its path are accepted; None if unknown."""
        if not self.survival:
            return None
        parent = self.parents[index] if self.parents else index - 1
        before = 1.0 if parent == ROOT else self.survival[parent]
        return min(1.0, self.survival[index] / before) if before > 0.0 else 0.0

    @property
    def whole(self) -> HintTail:
        return HintTail(self.draft_tokens, self.survival, False, self.sources, self.parents)

    def tail(self, passed: int, *, after_mismatch: bool = False) -> HintTail:
        """Return the part after `passed` tokens of the main path; `after_mismatch`: the last was wrong."""
        whole = HintTail(self.draft_tokens, self.survival, after_mismatch, self.sources, self.parents)
        return whole.after(passed)


@value
class HintTail:
    """The tokens of a hint that may come next: a chain or a tree (`trees.py`)."""

    draft_tokens: tuple[int, ...] = ()
    survival: tuple[float, ...] = ()
    after_mismatch: bool = False
    sources: tuple[str, ...] = ()
    parents: Parents = CHAIN

    @property
    def main(self) -> HintTail:
        """Return its main path, a chain."""
        if not self.parents:
            return self
        return self.only(main_path(self.parents, len(self.draft_tokens)), CHAIN)

    def follow(self, confirmed: Sequence[int]) -> list[int]:
        """Return the nodes of `confirmed` tokens, up to the first that is not in it."""
        return follow(self.draft_tokens, self.parents, confirmed)

    def first(self, count: int) -> HintTail:
        return HintTail(
            self.draft_tokens[:count],
            self.survival[:count],
            self.after_mismatch,
            self.sources[:count],
            simplified(self.parents[:count]) if self.parents else CHAIN,
        )

    def after(self, count: int) -> HintTail:
        """Return what follows the first `count` tokens of the main path if these are accepted."""
        if not self.parents or count == 0:
            return self.below(count - 1)
        path = main_path(self.parents, len(self.draft_tokens))
        return self.below(path[count - 1]) if count <= len(path) else NOTHING

    def below(self, node: int) -> HintTail:
        """Return what follows `node` if it is accepted; all of it after ROOT."""
        if node == ROOT:
            return self
        if self.parents:
            left = self.only(*subtree(self.parents, len(self.draft_tokens), node))
            tokens, survival, sources, parents = left.draft_tokens, left.survival, left.sources, left.parents
        else:
            rest, parents = slice(node + 1, None), CHAIN
            tokens, survival, sources = self.draft_tokens[rest], self.survival[rest], self.sources[rest]
        if survival:
            # The path has survived, so the chances of the others are conditional on that.
            sure = self.survival[node]
            survival = tuple(min(1.0, chance / sure) if sure > 0.0 else 0.0 for chance in survival)
        return HintTail(tokens, survival, self.after_mismatch, sources, parents)

    def only(self, nodes: Sequence[int], parents: Parents) -> HintTail:
        """Return these nodes, with the parents that they have among themselves."""
        return HintTail(
            tuple(self.draft_tokens[node] for node in nodes),
            tuple(self.survival[node] for node in nodes) if self.survival else (),
            self.after_mismatch,
            tuple(self.sources[node] for node in nodes) if self.sources else (),
            parents,
        )

    @property
    def first_source(self) -> str:
        return self.sources[0] if self.sources else ""

    @property
    def last_source(self) -> str:
        return self.sources[-1] if self.sources else ""


NOTHING = HintTail()

"""The tokens between which a model writes its reasoning, before its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_MOST_SPACES = 4


class ReasoningMarks(NamedTuple):
    """The marks as texts and as tokens."""

    opening: str
    closing: str
    opening_token: int
    closing_token: int

    def is_open(self, prompt: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
        """Return True if the prompt ends with the opening mark, apart from spaces."""
        for token in reversed(prompt[-1 - _MOST_SPACES :]):
            if token == self.opening_token:
                return True
            if not decode((token,)).isspace():
                return False
        return False


def reasoning_marks(tokens: Mapping[str, int]) -> ReasoningMarks | None:
    """Return the marks of a model with these added tokens; None if it has none."""
    for opening, closing in _PAIRS:
        if opening in tokens and closing in tokens:
            return ReasoningMarks(opening, closing, tokens[opening], tokens[closing])
    return None

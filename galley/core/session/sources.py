"""The sources of draft tokens that a session has itself: its grammar, and what its caller predicts.

They are asked before the draft pool, cost only a row of the target for each token, and are judged apart from
the pool. A forced token is sure but for its tokenization: the grammar forces a string, and proposes the
tokens that the tokenizer makes of it. The survival of predicted tokens is measured (`PredictionLookup`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from galley.core.lookup.prediction import PredictionLookup
from galley.core.names import GRAMMAR, PREDICTION
from galley.core.values import value


class Grammar(Protocol):
    """The grammar of one session, at the end of its confirmed output."""

    def confirm(self, tokens: Sequence[int]) -> None:
        """Advance by further tokens of the output."""

    def forced(self, most: int, ahead: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the tokens, at most so many, that must follow the output and the draft tokens `ahead`."""

    def allowed_prefix(self, tokens: Sequence[int], ahead: Sequence[int] = ()) -> int:
        """Return how many of the tokens may follow the output and the draft tokens `ahead`."""


@value
class LocalProposal:
    """Draft tokens of one source; `survival[i]` is the chance that tokens 0 to i are all accepted."""

    source: str
    tokens: tuple[int, ...]
    survival: tuple[float, ...]


class LocalSources:
    """The sources of one session, of which each may be missing."""

    def __init__(self, grammar: Grammar | None = None, prediction: PredictionLookup | None = None) -> None:
        self.prediction = prediction
        self._grammar = grammar

    def confirm(self, tokens: Sequence[int]) -> None:
        """Advance by further tokens of the output."""
        if self._grammar is not None:
            self._grammar.confirm(tokens)
        if self.prediction is not None:
            self.prediction.follow(tokens)

    def forced(self, most: int, ahead: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the tokens, at most so many, that the grammar forces after the output and `ahead`."""
        return () if self._grammar is None else self._grammar.forced(most, ahead)

    def propose(self, ahead: tuple[int, ...], most: int) -> list[LocalProposal]:
        """Return up to `most` tokens that follow the output and the draft tokens `ahead`."""
        proposals: list[LocalProposal] = []
        forced = self.forced(most, ahead)
        if forced:
            proposals.append(LocalProposal(GRAMMAR, forced, (1.0,) * len(forced)))
            ahead += forced
        if self.prediction is not None and len(forced) < most:
            tokens, survival = self.prediction.find(ahead, most - len(forced))
            if tokens and self._grammar is not None:
                tokens = tokens[: self._grammar.allowed_prefix(tokens, ahead)]
            if tokens:
                proposals.append(LocalProposal(PREDICTION, tokens, survival[: len(tokens)]))
        return proposals

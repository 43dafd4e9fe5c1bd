"""Follow the grammar of a session whose confirmed tokens are a list that grows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from galley.core.errors import GalleyError
from galley.core.grammar.compiled import MOST_AHEAD, CompiledGrammar, GrammarState
from galley.core.trees import CHAIN, Parents

# Confirmed tokens by which a state may lag behind and still be brought up at once, in a tenth of a
# millisecond. More, as after a failover, are left to the engine.
_MOST_LAG = 64
# A step waits for its masks, so draft tokens of a grammar whose rows take longer than this gain nothing.
_MOST_ROW_NS = 2_000_000
# Time that the event loop has for one check of certain tokens.
_MOST_CHECK_NS = 1_000_000


class GrammarFollower:
    """A grammar's state that has seen the first `state.length` tokens of a session's output.

    `tokens` are all confirmed tokens, and only grow. An engine may advance the state, too, while a step runs.
    """

    def __init__(self, grammar: CompiledGrammar, tokens: Sequence[int], prompt_len: int) -> None:
        self.state: GrammarState = grammar.start()
        self._grammar = grammar
        self._tokens = tokens
        self._prompt_len = prompt_len
        self._checked: tuple[tuple[int, tuple[int, ...], Parents], Sequence[int]] = ((-1, (), CHAIN), ())
        self._certain: tuple[int, int, tuple[int, ...]] = (-1, 0, ())

    def resume(self, grammar: CompiledGrammar, tokens: Sequence[int], prompt_len: int) -> bool:
        """Follow these tokens from now on; return False if the state has seen others."""
        seen = slice(prompt_len, self._seen)
        if self._grammar is not grammar or self._prompt_len != prompt_len or self._seen > len(tokens):
            return False
        if list(self._tokens[seen]) != list(tokens[seen]):
            return False
        self._tokens = tokens
        return True

    @property
    def _seen(self) -> int:
        return self._prompt_len + self.state.length

    def catch_up(self) -> None:
        """Advance the state to the last token. Raise GalleyError; the state is of no use then."""
        self.state.confirm(self._tokens[self._seen :])

    def allowed_nodes(self, draft_tokens: tuple[int, ...], parents: Parents = CHAIN) -> Sequence[int]:
        """Return which of the first draft tokens the grammar allows, in order, each after those on its path.

        None while the state lags far behind, or where the last masks took long: then a step has one of them.
        """
        if self.state.row_ns > _MOST_ROW_NS:
            return ()
        draft_tokens, parents = draft_tokens[:MOST_AHEAD], parents[:MOST_AHEAD]
        place = (len(self._tokens), draft_tokens, parents)
        if self._checked[0] != place:
            is_known = draft_tokens and self._is_near()
            self._checked = (place, self.state.allowed_nodes(draft_tokens, parents) if is_known else ())
        return self._checked[1]

    def certain(self, most: int) -> tuple[int, ...]:
        """Return at most `most` tokens that follow whatever the model computes: their masks allow no other.

        Checking them takes the event loop's time, so a grammar whose masks take long has fewer of them.
        """
        most = min(most, _MOST_CHECK_NS // max(1, self.state.row_ns))
        if most <= 0:
            return ()
        position, checked, run = self._certain
        if position != len(self._tokens) or (len(run) == checked < most):
            run = self._only_allowed(most) if self._is_near() else ()
            self._certain = (len(self._tokens), most, run)
        return run[:most]

    def _only_allowed(self, most: int) -> tuple[int, ...]:
        # A forced text may still be written by other tokens, so the masks decide.
        try:
            run = self.state.forced(most)
            if not run:
                return ()
            masks = self.state.masks(run[:-1])
        except GalleyError:
            return ()  # nothing is known now of what may follow
        is_only = np.bitwise_count(masks).sum(axis=1) == 1
        for index, token in enumerate(run):
            if not is_only[index] or not masks[index, token >> 5] >> (token & 31) & 1:
                return run[:index]
        return run

    def _is_near(self) -> bool:
        """Bring the state up to the last token; return False if it lags too far behind, or has failed."""
        if len(self._tokens) - self._seen > _MOST_LAG:
            return False
        self.state.may_compile = False
        try:
            self.catch_up()
        except GalleyError:
            return False  # the engine gets the same error, and reports it
        return True


def follow(
    before: GrammarFollower | None, grammar: CompiledGrammar, tokens: Sequence[int], prompt_len: int
) -> GrammarFollower:
    """Return a follower of these tokens: `before` if its state has seen no others, or a new one."""
    if before is not None and before.resume(grammar, tokens, prompt_len):
        return before
    return GrammarFollower(grammar, tokens, prompt_len)

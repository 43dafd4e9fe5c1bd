"""The grammars of a draft's sessions: a state has seen the confirmed tokens, and only tries draft tokens."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from galley.core.errors import GalleyError
from galley.core.grammar.compiled import CompiledGrammar, GrammarState
from galley.core.step import Draw
from services.draft.strategies.base import DraftJob, DraftSession

# Number of tokens that a state has seen last and that are compared again.
_TAIL = 32


@dataclass(frozen=True, slots=True)
class _Followed:
    """The state of a session, and the last output tokens that it has seen."""

    grammar: CompiledGrammar
    prompt_len: int
    state: GrammarState
    tail: list[int]

    @property
    def seen(self) -> int:
        return self.prompt_len + self.state.length

    def goes_on(self, job: DraftJob) -> bool:
        """Return True if the session still begins with what the state has seen.

        The hash of the slice vouches for the tokens before it.
        """
        begin = self.seen - len(self.tail)
        return (
            (job.grammar, job.slice.prompt_len) == (self.grammar, self.prompt_len)
            and begin <= job.slice.start
            and self.seen <= job.session.confirmed
            and job.session.tokens[begin : self.seen] == self.tail
        )


class DraftGrammars:
    """The grammar state of each session that drafts here."""

    def __init__(self) -> None:
        self._followed: WeakKeyDictionary[DraftSession, _Followed] = WeakKeyDictionary()

    def state_of(self, job: DraftJob) -> GrammarState | None:
        """Return the state after the session's confirmed tokens.

        None without a grammar, or where it allows no such tokens: then anything may be proposed.
        """
        before = self._followed.pop(job.session, None)
        if job.grammar is None:
            return None
        session, prompt_len = job.session, job.slice.prompt_len
        if before is None or not before.goes_on(job):
            before = _Followed(job.grammar, prompt_len, job.grammar.start(), [])
        try:
            before.state.confirm(session.tokens[before.seen : session.confirmed])
        except GalleyError:
            return None
        tail = session.tokens[max(prompt_len, session.confirmed - _TAIL) : session.confirmed]
        self._followed[session] = _Followed(job.grammar, prompt_len, before.state, tail)
        return before.state


def tried_mask(state: GrammarState, draw: Draw) -> NDArray[np.uint32]:
    """Return the mask of a draw whose history ends with draft tokens: [1, words]."""
    return state.mask_after(draw.history[draw.prompt_len + state.length :])[None]

"""The grammars of a draft's sessions: a state has seen the confirmed tokens, and only tries draft tokens."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from galley.core.errors import GalleyError
from galley.core.grammar.compiled import GrammarState
from galley.core.grammar.follower import GrammarFollower, follow
from galley.core.step import Draw
from services.draft.strategies.base import DraftJob, DraftSession


class DraftGrammars:
    def __init__(self) -> None:
        self._followers: WeakKeyDictionary[DraftSession, GrammarFollower] = WeakKeyDictionary()

    def state_of(self, job: DraftJob) -> GrammarState | None:
        """Return the state after the session's confirmed tokens.

        None without a grammar, or where it allows no such tokens: then anything may be proposed.
        """
        before = self._followers.pop(job.session, None)
        if job.grammar is None:
            return None
        confirmed = job.session.tokens[: job.session.confirmed]
        follower = follow(before, job.grammar, confirmed, job.slice.prompt_len)
        try:
            follower.catch_up()
        except GalleyError:
            return None
        self._followers[job.session] = follower
        return follower.state


def tried_mask(state: GrammarState, draw: Draw) -> NDArray[np.uint32]:
    """Return the mask of a draw whose history ends with draft tokens: [1, words]."""
    return state.mask_after(draw.history[draw.prompt_len + state.length :])[None]

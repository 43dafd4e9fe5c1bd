"""Prompt lookup at the gateway: what a session is drafted with while no draft can be asked.

It answers as a draft would: it keeps the tokens that it was sent, tells of a miss by content, and goes on
from guesses. It knows the session's own tokens alone; a draft's lookup knows recent answers too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.core import events as ev
from services.core.content import Miss, look_up, prefix_hash
from services.core.lookup import SessionLookup

if TYPE_CHECKING:
    from services.core.answer import SessionSpec

# Tokens that one proposal follows, some milliseconds: a long prompt must not hold up the other sessions.
_MOST_AT_ONCE = 1024
# A shorter match is mere chance.
_LEAST_MATCH = 2


class Lookup:
    """Of one session."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._followed = SessionLookup()

    def propose(self, spec: SessionSpec, request: ev.Propose) -> ev.Proposed | ev.CacheMissed:
        """At once, and maybe nothing."""
        part = request.slice
        found = look_up(self._tokens, part.start, part.tokens, part.prefix_hash)
        if isinstance(found, Miss):
            return ev.CacheMissed(request.request_id, found.have, found.prefix_hash)
        self._tokens[part.start :] = part.tokens
        position = len(self._tokens)
        guesses = self._guess(spec, position - request.ahead, request.k)
        return ev.Proposed(
            request.request_id, position, prefix_hash(self._tokens), guesses, cache_len=position
        )

    def _guess(self, spec: SessionSpec, confirmed: int, k: int) -> tuple[int, ...]:
        """What may follow all tokens, of which the first `confirmed` are no guesses."""
        if not self._follow(confirmed):
            return ()
        room = max(0, spec.max_position - len(self._tokens) - 1)
        found = self._followed.find(self._tokens[confirmed:], min(k, room))
        return found.tokens if found.matched >= _LEAST_MATCH else ()

    def _follow(self, confirmed: int) -> bool:
        """Whether all confirmed tokens have been followed."""
        tokens = self._tokens[:confirmed]
        if not self._followed.agrees(tokens, 0):
            self._followed = SessionLookup()
        at = len(self._followed)
        self._followed.follow(tokens[at : at + _MOST_AT_ONCE])
        return len(self._followed) == confirmed

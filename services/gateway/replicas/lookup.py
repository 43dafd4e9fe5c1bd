"""Prompt lookup at the gateway: what a session is drafted with while no draft can be asked.

It answers as a draft would: it keeps the tokens that it was sent, tells of a miss by content, and goes on
from guesses. It knows the session's own tokens alone; a draft's lookup knows recent answers too.
"""

from __future__ import annotations

from collections.abc import Sequence

from galley.core.answer.answer import SessionSpec
from galley.core.content import Miss, PrefixHasher, look_up
from galley.core.lookup.lookup import SessionLookup
from galley.core.names import LOOKUP
from galley.core.session import events as ev

# Tokens that one proposal follows, some milliseconds: a long prompt must not hold up the other sessions.
_MOST_AT_ONCE = 1024
# A shorter match is mere chance.
_LEAST_MATCH = 2


class Lookup:
    """Of one session. A proposal costs what is new since the last, not what the session holds."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._hasher = PrefixHasher()
        # Its tokens are the first of ours.
        self._followed = SessionLookup()

    def propose(self, spec: SessionSpec, request: ev.Propose) -> ev.Proposed | ev.CacheMissed:
        """At once, and maybe nothing."""
        part = request.slice
        found = look_up(self._tokens, part.start, part.tokens, part.prefix_hash, self._hasher)
        if isinstance(found, Miss):
            return ev.CacheMissed(request.request_id, found.have, found.prefix_hash)
        position = part.start + len(part.tokens)
        self._replace(found.agree, part.tokens[found.agree - part.start :])
        guesses = self._guess(spec, position - request.ahead, request.k)
        return ev.Proposed(
            request.request_id,
            position,
            self._hasher.digest(self._tokens, position),
            guesses,
            cache_len=position,
            strategy=LOOKUP,
        )

    def _replace(self, start: int, tokens: Sequence[int]) -> None:
        """`tokens` stand from `start` on."""
        self._hasher.truncate(start)
        self._tokens[start:] = tokens
        if start < len(self._followed):
            self._followed = SessionLookup()

    def _guess(self, spec: SessionSpec, confirmed: int, k: int) -> tuple[int, ...]:
        """What may follow all tokens, of which the first `confirmed` are no guesses."""
        if not self._follow(confirmed):
            return ()
        room = max(0, spec.max_position - len(self._tokens) - 1)
        found = self._followed.find(self._tokens[confirmed:], min(k, room))
        return found.tokens if found.matched >= _LEAST_MATCH else ()

    def _follow(self, confirmed: int) -> bool:
        """Whether all confirmed tokens, and no others, have been followed."""
        if confirmed < len(self._followed):
            self._followed = SessionLookup()
        at = len(self._followed)
        self._followed.follow(self._tokens[at : min(confirmed, at + _MOST_AT_ONCE)])
        return len(self._followed) == confirmed

"""The sessions that a draft knows, within bounds on their number and their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator

from galley.core.content import SessionKey
from galley.core.errors import InvalidField, Overloaded
from services.draft.strategies.base import DraftSession

_RETRY_AFTER_S = 1.0


class SessionTable:
    """Sessions by key, each accounted with the number of tokens that it may hold."""

    def __init__(self, max_sessions: int, max_tokens: int) -> None:
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._sessions: OrderedDict[SessionKey, DraftSession] = OrderedDict()
        self._tokens = 0

    def peek(self, key: SessionKey) -> DraftSession | None:
        """Return the session, or None, without counting a use."""
        return self._sessions.get(key)

    def admit(self, key: SessionKey, tokens: int, busy: Container[SessionKey]) -> DraftSession:
        """Return the session, new or not, with room for `tokens`; evict idle ones that are not `busy`.

        Raise Overloaded, having changed nothing, if that does not make room; InvalidField if nothing could.
        """
        if tokens > self._max_tokens:
            raise InvalidField(
                "slice.tokens", f"must be <= {self._max_tokens} (--max-kv-tokens), got {tokens}"
            )
        session = self._sessions.get(key)
        more_tokens = tokens - (session.room if session else 0)
        for victim in list(self._victims(key, session is None, more_tokens, busy)):
            self._tokens -= self._sessions.pop(victim).room
        if session is None:
            session = self._sessions[key] = DraftSession()
        self._sessions.move_to_end(key)
        session.room = tokens
        self._tokens += more_tokens
        return session

    def _victims(
        self, key: SessionKey, more_sessions: int, more_tokens: int, busy: Container[SessionKey]
    ) -> Iterator[SessionKey]:
        excess_sessions = len(self._sessions) + more_sessions - self._max_sessions
        excess_tokens = self._tokens + more_tokens - self._max_tokens
        for idle, session in self._sessions.items():
            if excess_sessions <= 0 and excess_tokens <= 0:
                return
            if idle != key and idle not in busy:
                yield idle
                excess_sessions -= 1
                excess_tokens -= session.room
        if excess_sessions > 0:
            raise Overloaded(f"all {self._max_sessions} sessions (--max-sessions) are busy", _RETRY_AFTER_S)
        if excess_tokens > 0:
            raise Overloaded(f"all {self._max_tokens} tokens (--max-kv-tokens) are in use", _RETRY_AFTER_S)

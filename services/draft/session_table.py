"""Keep a value a session, bounded by sessions and tokens; the least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Generic, TypeVar

from galley.core.content import SessionKey
from galley.core.errors import Overloaded

T = TypeVar("T")

_RETRY_AFTER_S = 1.0


class SessionTable(Generic[T]):
    """Sessions by key, each accounted with the number of tokens that it may hold."""

    def __init__(self, open_session: Callable[[], T], *, max_sessions: int, max_tokens: int) -> None:
        self._open = open_session
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._sessions: OrderedDict[SessionKey, T] = OrderedDict()
        self._sizes: dict[SessionKey, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def tokens(self) -> int:
        """Tokens accounted over all sessions."""
        return self._total

    def peek(self, key: SessionKey) -> T | None:
        """Return the session, or None; this does not count as a use."""
        return self._sessions.get(key)

    def admit(self, key: SessionKey, tokens: int, busy: Container[SessionKey]) -> T:
        """Return the session, new or not, with room for `tokens`; evict idle ones that are not `busy`.

        Raises Overloaded, having changed nothing, if that does not make room.
        """
        excess_tokens = self._total - self._sizes.get(key, 0) + tokens - self._max_tokens
        excess_sessions = len(self._sessions) + (key not in self._sessions) - self._max_sessions
        for victim in self._victims(key, excess_sessions, excess_tokens, busy):
            self.drop(victim)
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = self._open()
        self._sessions.move_to_end(key)
        self.resize(key, tokens)
        return session

    def resize(self, key: SessionKey, tokens: int) -> None:
        """Account `tokens` for a session that is here."""
        self._total += tokens - self._sizes.get(key, 0)
        self._sizes[key] = tokens

    def drop(self, key: SessionKey) -> None:
        """Forget the session, if it is here."""
        if self._sessions.pop(key, None) is not None:
            self._total -= self._sizes.pop(key)

    def _victims(
        self, key: SessionKey, excess_sessions: int, excess_tokens: int, busy: Container[SessionKey]
    ) -> list[SessionKey]:
        victims: list[SessionKey] = []
        for idle in self._sessions:
            if excess_sessions <= 0 and excess_tokens <= 0:
                break
            if idle == key or idle in busy:
                continue
            victims.append(idle)
            excess_sessions -= 1
            excess_tokens -= self._sizes[idle]
        if excess_sessions > 0:
            raise Overloaded(f"all {self._max_sessions} sessions are busy", _RETRY_AFTER_S)
        if excess_tokens > 0:
            raise Overloaded(f"the caches of busy sessions fill {self._max_tokens} tokens", _RETRY_AFTER_S)
        return victims

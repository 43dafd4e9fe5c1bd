"""The grammar states of sessions, kept from one request of a session to the next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from galley.core.content import SessionKey
from galley.core.grammar.follower import GrammarFollower, follow
from galley.core.scheduler.messages import VerifyRequest

# Sessions whose state is kept at least: each takes some kilobytes.
_LEAST_STATES = 256


class SessionGrammars:
    def __init__(self, max_sessions: int) -> None:
        """Keep the states of the `max_sessions` sessions that may have KV, and of more if these are few."""
        self._most = max(_LEAST_STATES, max_sessions)
        self._kept: OrderedDict[SessionKey, GrammarFollower] = OrderedDict()

    def follow(self, message: VerifyRequest, tokens: Sequence[int]) -> GrammarFollower | None:
        """Return a follower of the request's confirmed `tokens`, None without a grammar."""
        before = self._kept.pop(message.key, None)
        if message.compiled is None:
            return None
        follower = follow(before, message.compiled, tokens, message.prompt_len)
        self._kept[message.key] = follower
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return follower

    def forget(self, key: SessionKey) -> None:
        self._kept.pop(key, None)

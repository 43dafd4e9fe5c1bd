"""Keep the draft tokens of a session with their evidence, to calibrate from and to reuse."""

from __future__ import annotations

from typing import Generic, TypeVar

from galley.core.content import common_prefix_len
from services.draft.strategies.base import DraftSession

E = TypeVar("E")


class DraftHistory(Generic[E]):
    """Consecutive draft tokens from position `first` on, each with its evidence."""

    __slots__ = ("_evidence", "_first", "_rules", "_tokens")

    def __init__(self) -> None:
        self._first = 0
        self._tokens: list[int] = []
        self._evidence: list[E] = []
        self._rules: object = None

    def append(self, token: int, evidence: E) -> None:
        """Add the next draft token."""
        self._tokens.append(token)
        self._evidence.append(evidence)

    def compare(self, session: DraftSession, agreed: int) -> list[tuple[E, int, int]]:
        """Return the draft tokens that the session has answered, up to the first wrong one.

        Each is (evidence, draft token, confirmed token).
        Drops these tokens, and those that the session contradicts or has passed. The session has not changed
        before position `agreed` since the last call.
        """
        verdicts: list[tuple[E, int, int]] = []
        if agreed >= self._first:
            confirmed = session.tokens[self._first : session.confirmed]
            for token, evidence, right in zip(self._tokens, self._evidence, confirmed, strict=False):
                verdicts.append((evidence, token, right))
                if token != right:
                    break
        ahead = session.tokens[self._first :]
        if agreed < self._first or common_prefix_len(self._tokens, ahead) < len(ahead):
            self._first = len(session.tokens)
            self._cut(self._first)
        else:
            answered = max(0, session.confirmed - self._first)
            self._first += answered
            del self._tokens[:answered], self._evidence[:answered]
        return verdicts

    def ready(self, position: int, most: int, rules: object) -> list[tuple[int, E]]:
        """Return at most `most` kept tokens from `position` on, with their evidence; drop the rest.

        Tokens that were drawn by other `rules` are dropped. Call it after `compare`, with the session's end.
        """
        self._cut(position + (most if rules == self._rules else 0))
        self._rules = rules
        begin = position - self._first
        return list(zip(self._tokens[begin:], self._evidence[begin:], strict=True))

    def _cut(self, position: int) -> None:
        kept = max(0, position - self._first)
        del self._tokens[kept:], self._evidence[kept:]

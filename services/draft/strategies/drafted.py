"""What a session's draft has guessed and on what evidence: to learn from, and to go on from."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from galley.core.content import common_prefix_len
from services.draft.strategies.base import DraftSession

E = TypeVar("E")


class Verdict(NamedTuple, Generic[E]):
    """What was guessed at a position, on what evidence, and what was confirmed there."""

    evidence: E
    guessed: int
    confirmed: int


class Drafted(Generic[E]):
    """Tokens guessed for positions from `first` on, one after the other, each with its evidence.

    Those before the session's end are guesses that the target has not answered yet.
    """

    __slots__ = ("_evidence", "_first", "_rules", "_tokens")

    def __init__(self) -> None:
        self._first = 0
        self._tokens: list[int] = []
        self._evidence: list[E] = []
        self._rules: object = None

    def append(self, token: int, evidence: E) -> None:
        """The guess after the last one."""
        self._tokens.append(token)
        self._evidence.append(evidence)

    def compare(self, session: DraftSession, agreed: int) -> list[Verdict[E]]:
        """What was confirmed in place of the guesses that were asked about, up to the first wrong one.

        Forgets them. The session has not changed before position `agreed`, as far as it was known. Guesses
        that it contradicts, or leaves behind, are forgotten too.
        """
        verdicts: list[Verdict[E]] = []
        if agreed >= self._first:
            confirmed = session.tokens[self._first : session.confirmed]
            for token, evidence, right in zip(self._tokens, self._evidence, confirmed, strict=False):
                verdicts.append(Verdict(evidence, token, right))
                if token != right:
                    break
        ahead = session.tokens[self._first :]
        if agreed < self._first or common_prefix_len(self._tokens, ahead) < len(ahead):
            self._first = len(session.tokens)
            self._cut(self._first)
        else:
            told = max(0, session.confirmed - self._first)
            self._first += told
            del self._tokens[:told], self._evidence[:told]
        return verdicts

    def ready(self, position: int, most: int, rules: object) -> list[tuple[int, E]]:
        """At most so many tokens with their evidence, known for `position` on; what is beyond is forgotten.

        None if they were drawn by other `rules`. To be called after `compare`, with the session's end.
        """
        self._cut(position + (most if rules == self._rules else 0))
        self._rules = rules
        begin = position - self._first
        return list(zip(self._tokens[begin:], self._evidence[begin:], strict=True))

    def _cut(self, position: int) -> None:
        kept = max(0, position - self._first)
        del self._tokens[kept:], self._evidence[kept:]

"""What a session's draft has guessed and how sure it was: to learn from, and to go on from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.core.content import agreement

if TYPE_CHECKING:
    from services.draft.strategies.base import DraftSession


class Drafted:
    """Tokens guessed for positions from `first` on, one after the other, each with its bucket of confidence.

    Those before the session's end are guesses that the target has not answered yet.
    """

    __slots__ = ("_buckets", "_first", "_rules", "_tokens")

    def __init__(self) -> None:
        self._first = 0
        self._tokens: list[int] = []
        self._buckets: list[int] = []
        self._rules: object = None

    def append(self, token: int, bucket: int) -> None:
        """The guess after the last one."""
        self._tokens.append(token)
        self._buckets.append(bucket)

    def compare(self, session: DraftSession, agreed: int) -> list[tuple[int, bool]]:
        """What was confirmed of the guesses that were asked about, as (bucket, accepted); forgets them.

        The session has not changed before position `agreed`, as far as it was fed. Guesses that it
        contradicts, or leaves behind, are forgotten too.
        """
        verdicts: list[tuple[int, bool]] = []
        if agreed >= self._first:
            confirmed = session.tokens[self._first : session.confirmed]
            for token, bucket, right in zip(self._tokens, self._buckets, confirmed, strict=False):
                verdicts.append((bucket, token == right))
                if token != right:
                    break
        ahead = session.tokens[self._first :]
        if agreed < self._first or agreement(self._tokens, ahead) < len(ahead):
            self._first = len(session.tokens)
            self._cut(self._first)
        else:
            told = max(0, session.confirmed - self._first)
            self._first += told
            del self._tokens[:told], self._buckets[:told]
        return verdicts

    def ready(self, position: int, most: int, rules: object) -> list[tuple[int, int]]:
        """At most so many tokens and buckets, known for `position` on; what is beyond them is forgotten.

        None if they were drawn by other `rules`. To be called after `compare`, with the session's end.
        """
        self._cut(position + (most if rules == self._rules else 0))
        self._rules = rules
        begin = position - self._first
        return list(zip(self._tokens[begin:], self._buckets[begin:], strict=True))

    def _cut(self, position: int) -> None:
        kept = max(0, position - self._first)
        del self._tokens[kept:], self._buckets[kept:]

"""Prompt lookup: guess that what followed the last tokens before will follow them again.

"Prompt Lookup Decoding" (Saxena, 2023), over suffix automata: the longest match, however long, is known in
O(1) amortised a token. Looked up in are a session's own tokens, and what sessions like it were answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from galley.core.lookup.suffix_automaton import NO_MATCH, Match, SuffixAutomaton

# Of all answers of one kind, some 120 bytes each.
ANSWER_TOKENS = 65_536
# How many tokens before an answer are kept with it, so that its first ones have something that they follow.
_CONTEXT_TOKENS = 8
_MOST_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Tokens that followed where the last `matched` tokens stood before."""

    tokens: tuple[int, ...] = ()
    matched: int = 0


NOTHING = LookupResult()


class SessionLookup:
    """In the confirmed tokens of one session, followed while it grows."""

    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()
        self._text = self._automaton.begin()

    def __len__(self) -> int:
        """Tokens followed so far."""
        return len(self._text.tokens)

    def is_prefix_of(self, tokens: Sequence[int], start: int) -> bool:
        """Do `tokens` go on from those followed so far? Compared are those from `start` on."""
        followed = self._text.tokens
        return len(tokens) >= len(followed) and followed[start:].tolist() == tokens[start : len(followed)]

    def follow(self, tokens: Sequence[int]) -> None:
        """These come next."""
        for token in tokens:
            self._automaton.append(self._text, token)

    def find(self, ahead: Sequence[int], count: int) -> LookupResult:
        """At most `count` tokens that followed the longest suffix of the session's tokens and `ahead`."""
        match = _go_on(self._automaton, self._text.match, ahead)
        if not match.length:
            return NOTHING
        end = self._automaton.last_end(match)
        found = [*self._text.tokens[end : end + count], *ahead[max(0, end - len(self)) :]][:count]
        # All that there is runs into what was found of it, as a period is carried on.
        found += (found * count)[: count - len(found)]
        return LookupResult(tuple(found), match.length)


class RecentAnswers:
    """Answers of one kind of session, as they come: two generations of at most half the tokens each."""

    def __init__(self, limit: int = ANSWER_TOKENS) -> None:
        self.half = limit // 2
        self.newer = SuffixAutomaton()
        self.older = SuffixAutomaton()

    def make_room(self, count: int) -> None:
        """Where `count` more tokens do not fit into the newer generation, the older is dropped for it."""
        if len(self.newer) + count > self.half:
            self.newer, self.older = SuffixAutomaton(), self.newer


class AnswerLookup:
    """In recent answers, by one session of their kind, whose own answer becomes one of them."""

    def __init__(self, answers: RecentAnswers) -> None:
        self._answers = answers
        self._newer, self._older = answers.newer, answers.older
        self._text = self._newer.begin()
        self._older_match = NO_MATCH
        self._length = 0

    def follow(self, tokens: Sequence[int], prompt_len: int) -> None:
        """These are the session's confirmed tokens now, which only become more; the first are its prompt."""
        since = self._length or prompt_len
        self._answers.make_room(len(tokens) - since + _CONTEXT_TOKENS)
        if not self._length or self._newer is not self._answers.newer:
            self._begin()
            since -= _CONTEXT_TOKENS
        # Of a long answer that comes at once, as to a draft that is new to its session, the end is enough.
        most = min(_MOST_AT_ONCE, self._answers.half)
        for token in tokens[max(0, since, len(tokens) - most) :]:
            self._newer.append(self._text, token)
            self._older_match = self._older.step(self._older_match, token)
        self._length = len(tokens)

    def find(self, ahead: Sequence[int], count: int) -> LookupResult:
        """At most `count` tokens that followed the longest suffix of the session's tokens and `ahead`."""
        newer = self._newer.place(_go_on(self._newer, self._text.match, ahead))
        older = self._older.place(_go_on(self._older, self._older_match, ahead))
        place = older if older.length > newer.length else newer
        return LookupResult(tuple(place.tokens[place.end : place.end + count]), place.length)

    def _begin(self) -> None:
        self._newer, self._older = self._answers.newer, self._answers.older
        self._text = self._newer.begin()
        self._older_match = NO_MATCH


def _go_on(automaton: SuffixAutomaton, match: Match, ahead: Sequence[int]) -> Match:
    for token in ahead:
        match = automaton.step(match, token)
    return match

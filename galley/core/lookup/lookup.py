"""Prompt lookup: propose what followed the same tokens before.

"Prompt Lookup Decoding" (Saxena, 2023), over suffix automata: the longest match, however long, is known in
O(1) amortised per token. Searches a session's own tokens, and the answers of similar sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

from galley.core.lookup.suffix_automaton import NO_MATCH, NOWHERE, Match, Place, SuffixAutomaton, Text

# Tokens kept of all answers of one kind, some 120 bytes each.
ANSWER_TOKENS = 65_536
# Tokens before an answer that are kept with it, so that its first tokens can be matched.
_CONTEXT_TOKENS = 8
_MOST_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Tokens that followed an earlier occurrence of the last `matched` tokens.

    `is_shared` is True if that was in an answer that another replica followed.
    """

    tokens: tuple[int, ...] = ()
    matched: int = 0
    is_shared: bool = False


NOTHING = LookupResult()


class SessionLookup:
    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()
        self._text = self._automaton.begin()

    def __len__(self) -> int:
        return len(self._text.tokens)

    def is_prefix_of(self, tokens: Sequence[int], start: int) -> bool:
        """Return True if `tokens` continue those followed so far; compare only positions >= `start`."""
        followed = self._text.tokens
        return len(tokens) >= len(followed) and followed[start:].tolist() == tokens[start : len(followed)]

    def follow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._automaton.append(self._text, token)

    def find(self, ahead: Sequence[int], count: int) -> LookupResult:
        """Return up to `count` tokens that followed the longest suffix of all tokens and `ahead`."""
        match = _go_on(self._automaton, self._text.match, ahead)
        if not match.length:
            return NOTHING
        end = self._automaton.last_end(match)
        found = [*self._text.tokens[end : end + count], *ahead[max(0, end - len(self)) :]][:count]
        # The match reaches the end of the text: repeat it, as a period.
        found += (found * count)[: count - len(found)]
        return LookupResult(tuple(found), match.length)


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Tokens of a session from position `start` on: of its answer, and the last ones of its prompt.

    `session` is a hash that all replicas compute alike.
    """

    session: bytes
    start: int
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True)
class _Shared:
    """A received answer: its text, which ends before position `end` of its session."""

    text: Text
    end: int


class RecentAnswers:
    """Answers of one kind of session: two generations, each at most half of `limit` tokens."""

    def __init__(self, limit: int = ANSWER_TOKENS) -> None:
        self.half = limit // 2
        self.newer = SuffixAutomaton()
        self.older = SuffixAutomaton()
        # By session; in the newer generation.
        self._shared: dict[bytes, _Shared] = {}

    def receive(self, part: AnswerPart) -> None:
        """Add a part of an answer that another replica followed. Tokens that are known are left out."""
        self.make_room(len(part.tokens))
        answer = self._shared.get(part.session)
        if answer is None or answer.end < part.start:
            text = self.newer.begin(is_shared=True)
            answer = self._shared[part.session] = _Shared(text, part.start)
        for token in part.tokens[answer.end - part.start :]:
            self.newer.append(answer.text, token)
        answer.end = max(answer.end, part.end)

    def make_room(self, count: int) -> None:
        """Start a new generation, and drop the older, if `count` tokens do not fit into the newer."""
        if len(self.newer) + count > self.half:
            self.newer, self.older = SuffixAutomaton(), self.newer
            self._shared.clear()


class AnswerLookup:
    """Lookup in recent answers, by one session of their kind, whose own answer is added to them.

    It keeps no generation: a session may be known for long after its last request.
    """

    def __init__(self, answers: RecentAnswers) -> None:
        self._answers = answers
        self._older_match: Match = NO_MATCH
        self._begin()
        self._length = 0

    def follow(self, tokens: Sequence[int], prompt_len: int) -> int:
        """Add the session's confirmed tokens; the first `prompt_len` are its prompt; they only grow.

        Return the position of the first token that was added.
        """
        # A draft that is new to a session gets a long answer at once; the end of it is enough.
        answers = self._answers
        most = min(_MOST_AT_ONCE, answers.half)
        since = self._length or prompt_len
        answers.make_room(min(most, len(tokens) - since + _CONTEXT_TOKENS))
        if not self._length or self._newer() is not answers.newer:
            self._begin()
            since -= _CONTEXT_TOKENS
        first = max(0, since, len(tokens) - most)
        for token in tokens[first:]:
            answers.newer.append(self._text, token)
            self._older_match = answers.older.step(self._older_match, token)
        self._length = len(tokens)
        return first

    def find(self, ahead: Sequence[int], count: int) -> LookupResult:
        newer = _place(self._newer(), self._text.match, ahead)
        older = _place(self._older(), self._older_match, ahead)
        place = older if older.length > newer.length else newer
        tokens = tuple(place.text.tokens[place.end : place.end + count])
        return LookupResult(tokens, place.length, place.text.is_shared)

    def _begin(self) -> None:
        self._newer, self._older = ref(self._answers.newer), ref(self._answers.older)
        self._text = self._answers.newer.begin()
        self._older_match = NO_MATCH


def _place(automaton: SuffixAutomaton | None, match: Match, ahead: Sequence[int]) -> Place:
    return NOWHERE if automaton is None else automaton.place(_go_on(automaton, match, ahead))


def _go_on(automaton: SuffixAutomaton, match: Match, ahead: Sequence[int]) -> Match:
    for token in ahead:
        match = automaton.step(match, token)
    return match

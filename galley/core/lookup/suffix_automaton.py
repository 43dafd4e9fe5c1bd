"""Where the last tokens of a text stood before: a suffix automaton over texts that grow.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985); of several texts, Mohri et
al., "General suffix automaton construction algorithm and space bounds" (2009); for drafting, Hu et al., "SAM
Decoding" (arXiv 2411.10666). A state stands for all strings that end at the same places of the texts. Adding
a token to a text, and following another text by one token, take O(1) amortised.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

_ROOT = 0
_NONE = -1


@dataclass(frozen=True, slots=True)
class Match:
    """The last `length` tokens of what was followed stand in the texts too; `state` is the automaton's."""

    state: int = _ROOT
    length: int = 0


NO_MATCH = Match()


@dataclass(frozen=True, slots=True)
class Place:
    """The last `length` tokens of what was followed stand in `tokens` just before position `end`."""

    tokens: array[int]
    end: int
    length: int


NOWHERE = Place(array("I"), 0, 0)


class Text:
    """One of an automaton's texts. `match` is of its longest suffix that stood earlier or in another text."""

    __slots__ = ("match", "number", "state", "tokens")

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens = array("I")
        # Of the whole text: it is the longest string of its state, as a beginning has nothing before it.
        self.state = _ROOT
        self.match = NO_MATCH


class SuffixAutomaton:
    """Of texts that only grow: `begin` one, then `append` to it. Some 120 bytes a token."""

    def __init__(self) -> None:
        self._texts: list[Text] = []
        self._size = 0
        # By state: the state of the longest shorter suffix that stands at more places, how long the longest
        # string is, and where its strings ended last, as far as was noticed: before a position of a text.
        self._link = array("i")
        self._length = array("i")
        self._end = array("i")
        self._text = array("i")
        # Where a token leads. Most states know one token; what a state knows beside it is in a dictionary.
        self._token = array("q")
        self._next = array("i")
        self._more: dict[int, dict[int, int]] = {}
        self._new_state(_NONE, 0, 0, 0)

    def __len__(self) -> int:
        """Tokens of all texts together."""
        return self._size

    def begin(self) -> Text:
        """A new text, empty."""
        self._texts.append(Text(len(self._texts)))
        return self._texts[-1]

    def append(self, text: Text, token: int) -> None:
        """Add a token to one of this automaton's texts."""
        # Only now, so that a match never is of the very place that is being followed.
        self._end[text.match.state], self._text[text.match.state] = len(text.tokens), text.number
        text.tokens.append(token)
        self._size += 1
        if self._to(text.state, token) == _NONE:
            text.state = self._extend(text, token)
            shared = self._link[text.state]
        else:
            # The whole text so far stands in another one.
            text.state = shared = self._state_of_suffix(text.state, token)
        text.match = Match(shared, self._length[shared])

    def step(self, match: Match, token: int) -> Match:
        """Follow any tokens by one more: from the match of those so far to that of them and this one."""
        state, length = match.state, match.length
        while (to := self._to(state, token)) == _NONE:
            if state == _ROOT:
                return NO_MATCH
            state = self._link[state]
            # A state that was split since stands for longer strings alone.
            length = min(length, self._length[state])
        return Match(to, length + 1)

    def place(self, match: Match) -> Place:
        """Where a text goes on after the match; where none does yet, after its longest suffix that does."""
        state, length = match.state, match.length
        while state != _ROOT:
            length = min(length, self._length[state])
            tokens, end = self._texts[self._text[state]].tokens, self._end[state]
            if end < len(tokens):
                return Place(tokens, end, length)
            state = self._link[state]
        return NOWHERE

    def last_end(self, match: Match) -> int:
        """Before which position the match ended last, as far as was noticed: of an automaton of one text."""
        return self._end[match.state]

    def _to(self, state: int, token: int) -> int:
        """The state of this one's strings with `token` added; _NONE if they stand nowhere."""
        if self._token[state] == token:
            return self._next[state]
        more = self._more.get(state)
        return more.get(token, _NONE) if more else _NONE

    def _lead(self, state: int, token: int, to: int) -> None:
        if self._token[state] in (_NONE, token):
            self._token[state], self._next[state] = token, to
        else:
            self._more.setdefault(state, {})[token] = to

    def _extend(self, text: Text, token: int) -> int:
        """The new state of the whole text, which stands nowhere else."""
        state = self._new_state(_ROOT, len(text.tokens), len(text.tokens), text.number)
        at = text.state
        while at != _NONE and self._to(at, token) == _NONE:
            self._lead(at, token, state)
            at = self._link[at]
        if at != _NONE:
            self._link[state] = self._state_of_suffix(at, token)
        return state

    def _state_of_suffix(self, at: int, token: int) -> int:
        """The state of the longest string of `at` with this token, split off where a longer one shares it."""
        found = self._to(at, token)
        length = self._length[at] + 1
        if self._length[found] == length:
            return found
        split = self._new_state(self._link[found], length, self._end[found], self._text[found])
        self._token[split], self._next[split] = self._token[found], self._next[found]
        if found in self._more:
            self._more[split] = dict(self._more[found])
        self._link[found] = split
        while at != _NONE and self._to(at, token) == found:
            self._lead(at, token, split)
            at = self._link[at]
        return split

    def _new_state(self, link: int, length: int, end: int, text: int) -> int:
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        self._text.append(text)
        self._token.append(_NONE)
        self._next.append(_NONE)
        return len(self._link) - 1

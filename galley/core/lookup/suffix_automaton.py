"""A suffix automaton over growing texts: where the last tokens of a text occurred before.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985); for several texts, Mohri et
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
    """The last `length` tokens of a followed text occur in the automaton, in this `state`."""

    state: int = _ROOT
    length: int = 0


NO_MATCH = Match()


@dataclass(frozen=True, slots=True)
class Place:
    """The last `length` tokens of a followed text occur in `text` just before position `end`."""

    text: Text
    end: int
    length: int


class Text:
    """One of an automaton's texts. `match` is its longest suffix that occurred earlier or in another text.

    `is_shared` is its owner's mark.
    """

    __slots__ = ("is_shared", "match", "number", "state", "tokens")

    def __init__(self, number: int, *, is_shared: bool = False) -> None:
        self.number = number
        self.is_shared = is_shared
        self.tokens = array("I")
        # The state of the whole text, which is the longest string of that state.
        self.state = _ROOT
        self.match = NO_MATCH


NOWHERE = Place(Text(0), 0, 0)


class SuffixAutomaton:
    """An automaton of texts that only grow: `begin` one, then `append` to it. Some 120 bytes per token."""

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
        return self._size

    def begin(self, *, is_shared: bool = False) -> Text:
        self._texts.append(Text(len(self._texts), is_shared=is_shared))
        return self._texts[-1]

    def append(self, text: Text, token: int) -> None:
        # The end of the match is updated only now, so that a match never ends where the text itself does.
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
        """Return the match after one more token of a followed text, given the match before it."""
        state, length = match.state, match.length
        while (to := self._to(state, token)) == _NONE:
            if state == _ROOT:
                return NO_MATCH
            state = self._link[state]
            # A state that was split since stands for longer strings alone.
            length = min(length, self._length[state])
        return Match(to, length + 1)

    def place(self, match: Match) -> Place:
        """Return a place where a token follows the match, or its longest such suffix; else NOWHERE."""
        state, length = match.state, match.length
        while state != _ROOT:
            length = min(length, self._length[state])
            text, end = self._texts[self._text[state]], self._end[state]
            if end < len(text.tokens):
                return Place(text, end, length)
            state = self._link[state]
        return NOWHERE

    def last_end(self, match: Match) -> int:
        """Return the position after the match where it last occurred; the automaton must have one text."""
        return self._end[match.state]

    def _to(self, state: int, token: int) -> int:
        """Return the state of this one's strings with `token` appended; _NONE if they do not occur."""
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
        """Return the new state of the whole text, which occurs nowhere else."""
        state = self._new_state(_ROOT, len(text.tokens), len(text.tokens), text.number)
        at = text.state
        while at != _NONE and self._to(at, token) == _NONE:
            self._lead(at, token, state)
            at = self._link[at]
        if at != _NONE:
            self._link[state] = self._state_of_suffix(at, token)
        return state

    def _state_of_suffix(self, at: int, token: int) -> int:
        """Return the state of the longest string of `at` with this token, split off if it is shared."""
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

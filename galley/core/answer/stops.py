"""Find stop strings in text that arrives in pieces: the automaton of Aho and Corasick (1975, section 2).

Each character takes O(1) steps, amortized, however many stop strings there are and however much they repeat.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The stop strings, and how much of one the text ends with. `steps` counts the transitions made."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        # State 0 is the start. Each state stands for a prefix of a stop string, of length `_depth[state]`.
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._longest: list[int | None] = [None]
        """The longest stop string, by its index, that a state's prefix ends with."""
        for index, stop in enumerate(stops):
            self._insert(index, stop)
        self._fallback = self._fallbacks()
        """The state of the longest shorter prefix that a state's prefix ends with."""
        self._state = 0
        self.steps = 0

    @property
    def pending(self) -> int:
        """Return how many characters at the end of the text begin a stop string: as many as possible."""
        return self._depth[self._state]

    def reset(self) -> None:
        self._state = 0

    def search(self, text: str) -> tuple[int, str] | None:
        """Add `text`; return (position in it, stop string) of the first that ends in it, or None.

        The position is negative if the stop string begins in earlier text. Of several that begin at one
        position, return the first listed.
        """
        if not self._stops:
            return None
        found: tuple[int, int] | None = None
        for end, character in enumerate(text, 1):
            index = self._longest[self._step(character)]
            if index is not None:
                hit = (end - len(self._stops[index]), index)
                found = hit if found is None else min(found, hit)
        return None if found is None else (found[0], self._stops[found[1]])

    def _step(self, character: str) -> int:
        state = self._state
        self.steps += 1
        while state and character not in self._next[state]:
            state = self._fallback[state]
            self.steps += 1
        self._state = state = self._next[state].get(character, 0)
        return state

    def _insert(self, index: int, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].setdefault(character, len(self._next))
            if following == len(self._next):
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._longest.append(None)
            state = following
        if self._longest[state] is None:
            self._longest[state] = index

    def _fallbacks(self) -> list[int]:
        """Return the fallbacks, shorter prefixes first; complete `_longest` from them."""
        fallback = [0] * len(self._next)
        queue = list(self._next[0].values())
        for state in queue:
            for character, following in self._next[state].items():
                shorter = fallback[state]
                while shorter and character not in self._next[shorter]:
                    shorter = fallback[shorter]
                shorter = fallback[following] = self._next[shorter].get(character, 0)
                if self._longest[following] is None:
                    self._longest[following] = self._longest[shorter]
                queue.append(following)
        return fallback

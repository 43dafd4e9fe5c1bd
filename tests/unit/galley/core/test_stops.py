"""Stop strings in text that arrives in pieces: found as in one text, in O(1) a character."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.answer.stops import StopMatcher
from galley.core.answer.text import Piece, TextStream

STOPS = 16
STOP_BYTES = 255


class SearchedText:
    """The reference: search all held text for each stop string, compare it with each of its prefixes."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.held = ""

    def push(self, text: str, *, may_stop: bool) -> Piece:
        self.held += text
        if not may_stop:
            return self.release(len(self.held))
        hits = [(at, stop) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if hits:
            at, stop = min(hits, key=itemgetter(0))
            piece = Piece(self.held[:at], stop)
            self.held = ""
            return piece
        pending = max((self.overlap(stop) for stop in self.stops), default=0)
        return self.release(len(self.held) - pending)

    def release(self, length: int) -> Piece:
        text, self.held = self.held[:length], self.held[length:]
        return Piece(text)

    def overlap(self, stop: str) -> int:
        sizes = range(min(len(self.held), len(stop) - 1), 0, -1)
        return next((size for size in sizes if self.held.endswith(stop[:size])), 0)


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.text("ab", max_size=6), st.integers(0, 9)), max_size=25),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
def test_stops_are_found_as_by_searching_all_the_text(
    pushed: list[tuple[str, int]], stops: list[str]
) -> None:
    """A push that follows a stop string, or a token that may not stop, starts afresh."""
    stream = TextStream(lambda ids: "".join(pushed[i][0] for i in ids), (), stops)
    reference = SearchedText(stops)
    for index, (text, chance) in enumerate(pushed):
        if not text:
            continue  # reads as a control token
        may_stop = chance > 1
        expected = reference.push(text, may_stop=may_stop)
        assert stream.push(index, may_stop=may_stop) == expected
    assert stream.flush() == reference.held


@pytest.mark.parametrize(
    "stops",
    [
        ["a" * (STOP_BYTES - i) for i in range(STOPS)],
        ["a" * (STOP_BYTES - 1 - i) + "b" * (i + 1) for i in range(STOPS)],
    ],
    ids=["equal", "with another end"],
)
def test_long_stops_of_one_character_take_two_transitions_a_character(stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    searched = 0
    for _ in range(4):
        for text in ("a" * (STOP_BYTES - STOPS), "c", "a" * 40, "c"):
            assert matcher.search(text) is None
            searched += len(text)
            assert matcher.pending <= STOP_BYTES
    assert searched <= matcher.steps <= 2 * searched

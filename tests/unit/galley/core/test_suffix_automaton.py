"""Suffix automata against what they stand for, word for word."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.lookup.suffix_automaton import NO_MATCH, NOWHERE, Match, Place, SuffixAutomaton

TOKENS = st.lists(st.integers(0, 2), max_size=24)
WRITTEN = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=48)
FEW = settings(max_examples=120)


def stands_in(texts: Sequence[list[int]], string: list[int]) -> bool:
    n = len(string)
    return any(text[i : i + n] == string for text in texts for i in range(len(text) - n + 1))


def longest(followed: list[int], texts: Sequence[list[int]]) -> int:
    return next(n for n in range(len(followed), -1, -1) if stands_in(texts, followed[len(followed) - n :]))


def is_of(place: Place, followed: list[int], match: Match) -> bool:
    before = place.text.tokens[place.end - place.length : place.end].tolist()
    return (
        place.length <= match.length
        and place.end < len(place.text.tokens)
        and before == followed[len(followed) - place.length :]
    )


@FEW
@given(WRITTEN)
def test_a_match_is_the_longest_suffix_that_occurred_before(written: list[tuple[int, int]]) -> None:
    automaton = SuffixAutomaton()
    texts = [automaton.begin() for _ in range(3)]
    plain: list[list[int]] = [[], [], []]
    for which, token in written:
        plain[which].append(token)
        automaton.append(texts[which], token)
        others = [text for i, text in enumerate(plain) if i != which]
        match = texts[which].match
        assert match.length == longest(plain[which], [*others, plain[which][:-1]])
        place = automaton.place(match)
        assert place == NOWHERE or is_of(place, plain[which], match)
    assert len(automaton) == len(written)


@FEW
@given(TOKENS, TOKENS)
def test_following_a_text_finds_the_longest_suffix(text: list[int], followed: list[int]) -> None:
    automaton = SuffixAutomaton()
    written = automaton.begin()
    for token in text:
        automaton.append(written, token)
    match = NO_MATCH
    for i, token in enumerate(followed):
        match = automaton.step(match, token)
        assert match.length == longest(followed[: i + 1], [text])
        end = automaton.last_end(match)
        assert text[end - match.length : end] == followed[i + 1 - match.length : i + 1]


@FEW
@given(TOKENS, WRITTEN)
def test_a_growing_automaton_can_be_followed(text: list[int], more: list[tuple[int, int]]) -> None:
    automaton = SuffixAutomaton()
    written = automaton.begin()
    for token in text:
        automaton.append(written, token)
    match, followed, plain = NO_MATCH, list[int](), list(text)
    for grows, token in more:
        if grows:
            automaton.append(written, token)
            plain.append(token)
        else:
            followed.append(token)
            match = automaton.step(match, token)
        assert match.length <= longest(followed, [plain])
        place = automaton.place(match)
        assert place == NOWHERE or is_of(place, followed, match)


def test_a_match_is_never_the_position_being_written() -> None:
    automaton = SuffixAutomaton()
    text = automaton.begin()
    for token in [1, 2, 3, 1, 2, 4, 1, 2]:
        automaton.append(text, token)
    place = automaton.place(text.match)
    assert (place.end, place.length) == (5, 2)
    automaton.append(text, 5)
    automaton.append(text, 1)
    automaton.append(text, 2)
    assert automaton.place(text.match).end == 8


def test_a_shorter_suffix_is_used_where_no_text_continues() -> None:
    automaton = SuffixAutomaton()
    first, second = automaton.begin(), automaton.begin()
    for token in [2, 9]:
        automaton.append(first, token)
    for token in [1, 2]:
        automaton.append(second, token)
    match = automaton.step(automaton.step(NO_MATCH, 1), 2)
    assert match.length == 2
    place = automaton.place(match)
    assert (place.text.tokens.tolist(), place.end, place.length) == ([2, 9], 1, 1)


def test_the_work_is_linear() -> None:
    """A text has fewer than two states and three transitions a token (Blumer et al., theorem 1)."""
    for text in ([7] * 2000, [i % 7 for i in range(2000)], [i * i % 251 for i in range(2000)]):
        automaton = SuffixAutomaton()
        written = automaton.begin()
        steps = 0
        for token in text:
            before = written.match.length
            automaton.append(written, token)
            steps += before + 1 - written.match.length
        assert 0 <= steps <= len(text)

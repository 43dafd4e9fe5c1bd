"""What is kept of a session's guesses: each is judged once, by what was confirmed in its place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.content import common_prefix_len
from services.draft.strategies.base import DraftSession
from services.draft.strategies.drafted import Drafted

# What the target says, and what the draft guesses at each position after the truth; after anything else 9.
TRUTH = st.lists(st.integers(0, 2), min_size=40, max_size=40)
# Of each item: tokens confirmed since the last, how many guesses follow them, and how many are asked for.
ITEMS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 5)), max_size=12)


@given(TRUTH, TRUTH, ITEMS, st.booleans())
@settings(max_examples=200)
def test_every_guess_is_judged_once_and_rightly(
    truth: list[int], favoured: list[int], items: list[tuple[int, int, int]], astray: bool
) -> None:
    def guess(tokens: list[int]) -> int:
        right = tokens == truth[: len(tokens)]
        return favoured[len(tokens)] if right else 9

    session = DraftSession()
    drafted: Drafted[int] = Drafted()
    fed: list[int] = []
    judged: dict[int, bool] = {}
    confirmed = 1
    for more, ahead, asked in items:
        confirmed = min(30, confirmed + more)
        tokens = truth[:confirmed]
        for _ in range(ahead):
            tokens = [*tokens, 8 if astray else guess(tokens)]
        session.tokens, session.confirmed = tokens, confirmed
        for position, guessed, right in drafted.compare(session, common_prefix_len(fed, tokens)):
            assert position < confirmed
            assert position not in judged
            judged[position] = guessed == right
        ready = drafted.ready(len(tokens), asked, "rules")
        grown = list(tokens)
        for token, position in ready:
            assert (token, position) == (guess(grown), len(grown))
            grown.append(token)
        while len(grown) < len(tokens) + asked:
            drafted.append(guess(grown), len(grown))
            grown.append(guess(grown))
        if asked:
            fed = grown[:-1]
    assert all(accepted == (favoured[position] == truth[position]) for position, accepted in judged.items())


def test_guesses_drawn_by_other_rules_are_judged_but_not_used() -> None:
    session = DraftSession()
    drafted: Drafted[int] = Drafted()
    session.tokens, session.confirmed = [5], 1
    assert drafted.compare(session, 1) == []
    assert drafted.ready(1, 3, "rules") == []
    for i, token in enumerate([6, 7, 8]):
        drafted.append(token, i)
    session.tokens, session.confirmed = [5, 6], 1
    assert drafted.compare(session, 3) == []
    assert drafted.ready(2, 3, "other rules") == []
    session.tokens, session.confirmed = [5, 6, 4], 3
    assert drafted.compare(session, 2) == [(0, 6, 6)]

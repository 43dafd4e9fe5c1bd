"""What is kept of a session's proposals: each is judged once, by what was confirmed in its place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.content import common_prefix_len
from services.draft.strategies.base import DraftSession
from services.draft.strategies.model import DraftHistory

TRUTH = st.lists(st.integers(0, 2), min_size=40, max_size=40)
ITEMS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.integers(0, 5)), max_size=12)


@given(TRUTH, TRUTH, ITEMS, st.booleans())
@settings(max_examples=200)
def test_every_guess_is_judged_once_and_rightly(
    truth: list[int], favoured: list[int], items: list[tuple[int, int, int]], astray: bool
) -> None:
    def proposal(tokens: list[int]) -> int:
        right = tokens == truth[: len(tokens)]
        return favoured[len(tokens)] if right else 9

    session = DraftSession()
    history: DraftHistory[int] = DraftHistory()
    fed: list[int] = []
    judged: dict[int, bool] = {}
    confirmed = 1
    for more, ahead, request in items:
        confirmed = min(30, confirmed + more)
        tokens = truth[:confirmed]
        for _ in range(ahead):
            tokens = [*tokens, 8 if astray else proposal(tokens)]
        session.tokens, session.confirmed = tokens, confirmed
        for position, guessed, right in history.compare(session, common_prefix_len(fed, tokens)):
            assert position < confirmed
            assert position not in judged
            judged[position] = guessed == right
        ready = history.ready(len(tokens), request, "rules")
        grown = list(tokens)
        for token, position in ready:
            assert (token, position) == (proposal(grown), len(grown))
            grown.append(token)
        while len(grown) < len(tokens) + request:
            history.append(proposal(grown), len(grown))
            grown.append(proposal(grown))
        if request:
            fed = grown[:-1]
    assert all(accepted == (favoured[position] == truth[position]) for position, accepted in judged.items())


def test_guesses_drawn_by_other_rules_are_judged_but_not_used() -> None:
    session = DraftSession()
    history: DraftHistory[int] = DraftHistory()
    session.tokens, session.confirmed = [5], 1
    assert history.compare(session, 1) == []
    assert history.ready(1, 3, "rules") == []
    for i, token in enumerate([6, 7, 8]):
        history.append(token, i)
    session.tokens, session.confirmed = [5, 6], 1
    assert history.compare(session, 3) == []
    assert history.ready(2, 3, "other rules") == []
    session.tokens, session.confirmed = [5, 6, 4], 3
    assert history.compare(session, 2) == [(0, 6, 6)]

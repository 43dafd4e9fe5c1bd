"""Accept iff equal, cut after the first stop token and at max_position; and how often guesses match."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galley.core.acceptance import (
    Verdict,
    accepted_length,
    confirm,
    match_probability,
    match_probability_bound,
    total_variation,
)

FAR = 10**6


def verdict(draft: list[int], sampled: list[int], stops: tuple[int, ...] = (), **bounds: int) -> Verdict:
    given_bounds = {"position": 0, "max_position": FAR} | bounds
    return confirm(draft, sampled, stop_token_ids=frozenset(stops), **given_bounds)


@pytest.mark.parametrize(
    ("draft", "sampled", "expected"),
    [
        ([], [7], 0),
        ([7], [7, 8], 1),
        ([6], [7, 8], 0),
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 9, 3], [1, 2, 3, 4], 1),  # a match after a mismatch does not count
        ([1, 2, 3], [1, 2], 2),
        ([1, 9, 3], [1, 2], 1),
    ],
)
def test_accepted_length_is_the_longest_equal_prefix(
    draft: list[int], sampled: list[int], expected: int
) -> None:
    assert accepted_length(draft, sampled) == expected


def test_confirms_the_accepted_and_one_more() -> None:
    assert verdict([1, 2, 3], [1, 2, 3, 4]) == Verdict((1, 2, 3, 4), 3)
    assert verdict([1, 2, 9], [1, 2, 3, 4]) == Verdict((1, 2, 3), 2)
    assert verdict([9, 2, 3], [1, 2, 3, 4]) == Verdict((1,), 0)
    assert verdict([], [5]) == Verdict((5,), 0)


def test_cuts_after_the_first_stop_token() -> None:
    """The stop token itself is confirmed, and counts as accepted if the draft proposed it."""
    assert verdict([1, 2, 3], [1, 2, 3, 4], stops=(2,)) == Verdict((1, 2), 2)
    assert verdict([1, 2, 3], [1, 2, 3, 4], stops=(4,)) == Verdict((1, 2, 3, 4), 3)
    assert verdict([1, 9], [1, 2, 3], stops=(2,)) == Verdict((1, 2), 1)
    assert verdict([1, 2, 3], [1, 2, 3, 4], stops=(3, 1)) == Verdict((1,), 1)


def test_a_stop_token_before_min_tokens_does_not_stop() -> None:
    assert verdict([1, 2, 1], [1, 2, 1, 4], (1,), output_len=0, min_tokens=2) == Verdict((1, 2, 1), 3)
    assert verdict([1, 2, 1], [1, 2, 1, 4], (1,), output_len=2, min_tokens=2) == Verdict((1,), 1)


def test_cuts_at_max_position() -> None:
    """No token may stand at or beyond it."""
    assert verdict([1, 2, 3], [1, 2, 3, 4], position=10, max_position=12) == Verdict((1, 2), 2)
    assert verdict([1, 9, 3], [1, 2, 3, 4], position=10, max_position=12) == Verdict((1, 2), 1)
    assert verdict([1], [1, 2], position=10, max_position=11) == Verdict((1,), 1)
    assert verdict([1], [1, 2], position=10, max_position=10) == Verdict((), 0)
    assert verdict([1], [1, 2], position=10, max_position=3) == Verdict((), 0)


small = st.lists(st.integers(0, 2), max_size=6)


@given(
    draft=small,
    sampled=st.lists(st.integers(0, 2), min_size=1, max_size=7),
    stops=st.frozensets(st.integers(0, 2), max_size=2),
    room=st.integers(0, 8),
    output_len=st.integers(0, 4),
    min_tokens=st.integers(0, 6),
)
def test_confirmed_is_what_plain_decoding_says_token_by_token(
    draft: list[int], sampled: list[int], stops: frozenset[int], room: int, output_len: int, min_tokens: int
) -> None:
    got = confirm(
        draft,
        sampled,
        position=50,
        max_position=50 + room,
        stop_token_ids=stops,
        output_len=output_len,
        min_tokens=min_tokens,
    )
    plain: list[int] = []
    for i, token in enumerate(sampled):
        if i == room:
            break
        plain.append(token)
        stopped = token in stops and output_len + i >= min_tokens
        if stopped or i >= len(draft) or draft[i] != token:
            break
    assert got.tokens == tuple(plain)
    assert list(got.tokens[: got.accepted]) == draft[: got.accepted]
    assert len(got.tokens) - got.accepted in (0, 1)


def test_match_probability_of_known_pairs() -> None:
    assert match_probability([1.0], [1.0]) == 1.0
    assert match_probability([1.0, 0.0], [0.0, 1.0]) == 0.0
    assert match_probability([0.5, 0.5], [0.5, 0.5]) == pytest.approx(1.0)
    # Worked by hand: 1 / (1 + max(1/3, 1)) + 1 / (1 + max(3, 1)).
    assert match_probability([0.75, 0.25], [0.5, 0.5]) == pytest.approx(1 / 2 + 1 / 4)


weights = st.lists(st.integers(0, 20), min_size=2, max_size=6).filter(any)


@given(weights, weights)
def test_match_probability_lies_between_its_bounds(target: list[int], draft: list[int]) -> None:
    """(1 - TV) / (1 + TV) <= match <= 1 - TV (Daliri et al., arXiv 2408.07978); and it is symmetric."""
    size = min(len(target), len(draft))
    if not (any(target[:size]) and any(draft[:size])):
        return
    p = [weight / sum(target[:size]) for weight in target[:size]]
    q = [weight / sum(draft[:size]) for weight in draft[:size]]
    match = match_probability(p, q)
    assert match_probability_bound(p, q) - 1e-12 <= match <= 1 - total_variation(p, q) + 1e-12
    assert match == pytest.approx(match_probability(q, p))


def test_probabilities_of_different_vocabularies_are_refused() -> None:
    for function, (p, q) in product(
        (match_probability, total_variation), (([1.0], [0.5, 0.5]), ([0.5, 0.5], [1.0]))
    ):
        with pytest.raises(ValueError, match=r"shorter|longer"):
            function(p, q)

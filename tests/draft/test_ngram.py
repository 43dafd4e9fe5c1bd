"""Prompt lookup as a pure function."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.ngram import propose


def naive(tokens: list[int], k: int, min_n: int, max_n: int) -> list[int]:
    """The definition, word for word."""
    for n in range(max_n, min_n - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if len(tokens) > n and tokens[start : start + n] == tokens[-n:]:
                grown = list(tokens)
                for i in range(k):
                    grown.append(grown[start + n + i])
                return grown[len(tokens) :]
    return []


# Ids whose bytes repeat, so that matches across the boundaries of tokens come up.
IDS = st.sampled_from([0, 1, 256, 257, 65793, 16843009, 2**32 - 1])


@given(st.lists(IDS, max_size=40), st.integers(0, 6), st.integers(1, 3), st.integers(0, 3))
def test_it_is_the_definition(tokens: list[int], k: int, min_n: int, more: int) -> None:
    assert propose(tokens, k, min_n=min_n, max_n=min_n + more) == naive(tokens, k, min_n, min_n + more)


def test_the_longest_suffix_wins_then_the_most_recent() -> None:
    assert propose([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1, min_n=2, max_n=3) == [9]
    assert propose([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1, min_n=2, max_n=2) == [8]


def test_the_continuation_has_at_most_k_tokens() -> None:
    assert propose([1, 2, 5, 6, 7, 1, 2], 2, min_n=2, max_n=4) == [5, 6]


def test_a_period_is_carried_on() -> None:
    assert propose([7, 1, 2, 3, 1, 2, 3], 5, min_n=2, max_n=4) == [1, 2, 3, 1, 2]


def test_nothing_repeats_nothing_is_proposed() -> None:
    assert propose([1, 2, 3, 4], 4, min_n=1, max_n=4) == []
    assert propose([], 4, min_n=1, max_n=4) == []
    assert propose([1], 4, min_n=1, max_n=4) == []


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 2), (3, 2)])
def test_bounds(min_n: int, max_n: int) -> None:
    with pytest.raises(ValueError, match="min_n"):
        propose([1], 1, min_n=min_n, max_n=max_n)


def test_two_thousand_tokens_take_less_than_0_3_ms() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(49152) for _ in range(2048)]
    times = []
    for _ in range(51):
        begun = time.perf_counter_ns()
        propose(tokens, 8, min_n=2, max_n=4)
        times.append(time.perf_counter_ns() - begun)
    # The least, because this measures the code and not the machine's other work.
    assert min(times) < 300_000

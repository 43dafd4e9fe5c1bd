"""Accept iff equal; cut after the first stop token and at max_position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from galley.core.acceptance import Verdict, confirm
from galley.core.trees import CHAIN

FAR = 10**6


def verdict(draft: list[int], sampled: list[int], stops: tuple[int, ...] = (), **bounds: int) -> Verdict:
    given_bounds = {"position": 0, "max_position": FAR} | bounds
    return confirm(draft, sampled, parents=CHAIN, stop_token_ids=frozenset(stops), **given_bounds)


def test_confirms_the_accepted_and_one_more() -> None:
    assert verdict([1, 2, 3], [1, 2, 3, 4]) == Verdict((1, 2, 3, 4), 3)
    assert verdict([1, 2, 9], [1, 2, 3, 4]) == Verdict((1, 2, 3), 2)
    assert verdict([9, 2, 3], [1, 2, 3, 4]) == Verdict((1,), 0)
    assert verdict([], [5]) == Verdict((5,), 0)
    assert verdict([1, 9, 3], [1, 2, 3, 4]) == Verdict((1, 2), 1), "a match after a mismatch"


def test_cuts_after_the_first_stop_token() -> None:
    assert verdict([1, 2, 3], [1, 2, 3, 4], stops=(2,)) == Verdict((1, 2), 2, True)
    assert verdict([1, 2, 3], [1, 2, 3, 4], stops=(4,)) == Verdict((1, 2, 3, 4), 3, True)
    assert verdict([1, 9], [1, 2, 3], stops=(2,)) == Verdict((1, 2), 1, True)
    assert verdict([1, 2, 3], [1, 2, 3, 4], stops=(3, 1)) == Verdict((1,), 1, True)


def test_a_stop_token_before_min_tokens_does_not_stop() -> None:
    assert verdict([1, 2, 1], [1, 2, 1, 4], (1,), output_len=0, min_tokens=2) == Verdict((1, 2, 1), 3, True)
    assert verdict([1, 2, 1], [1, 2, 1, 4], (1,), output_len=2, min_tokens=2) == Verdict((1,), 1, True)


def test_cuts_at_max_position() -> None:
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
def test_confirmed_tokens_equal_plain_decoding(
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
    plain, stopped = list[int](), False
    for i, token in enumerate(sampled):
        if i == room:
            break
        plain.append(token)
        stopped = token in stops and output_len + i >= min_tokens
        if stopped or i >= len(draft) or draft[i] != token:
            break
    assert got.tokens == tuple(plain)
    assert got.stopped == stopped
    assert list(got.tokens[: got.accepted]) == draft[: got.accepted]
    assert len(got.tokens) - got.accepted in (0, 1)

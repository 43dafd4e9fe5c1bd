"""The measured curve, and how many draft rows it makes worth their time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.cost import PassTimes, rows_that_pay
from services.core.errors import InvalidField

CURVE = PassTimes.measured([(1, 10_000), (8, 12_000), (16, 30_000), (64, 60_000)])


def test_it_gives_the_measured_times_and_lines_between_them() -> None:
    assert [CURVE(rows) for rows in (1, 8, 12, 16, 64, 112)] == [
        10_000,
        12_000,
        21_000,
        30_000,
        60_000,
        90_000,
    ]
    assert CURVE(5000) == 60_000 + (5000 - 64) * 625
    assert CURVE.points == ((1, 10_000), (8, 12_000), (16, 30_000), (64, 60_000))


def test_noise_never_makes_more_rows_cheaper() -> None:
    times = PassTimes.measured([(1, 10), (2, 8), (4, 12)])
    assert [times(rows) for rows in (1, 2, 3, 4)] == [10, 10, 11, 12]


@pytest.mark.parametrize("points", [[], [(2, 10)], [(1, 0)], [(1, 10), (1, 11)], [(1, 10), (4, 11), (2, 12)]])
def test_nonsense_is_refused(points: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidField):
        PassTimes.measured(points)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    worth=st.lists(st.floats(0, 1), max_size=40).map(lambda chances: sorted(chances, reverse=True)),
    sessions=st.integers(1, 20),
    prompt_rows=st.integers(0, 30),
    room=st.integers(-3, 50),
)
def test_no_other_number_of_rows_confirms_more_tokens_per_time(
    worth: list[float], sessions: int, prompt_rows: int, room: int
) -> None:
    rows = sessions + prompt_rows
    chosen = rows_that_pay(worth, tokens=sessions, rows=rows, pass_ns=CURVE, room=room)

    def rate(count: int) -> float:
        return (sessions + sum(worth[:count])) / CURVE(rows + count)

    possible = range(max(0, min(room, len(worth))) + 1)
    assert chosen in possible
    assert rate(chosen) == pytest.approx(max(rate(count) for count in possible))
    assert rate(chosen) >= rate(0)

"""The measured curve, and how many draft rows it makes worth their time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.cost.model import LiveStepTimes, StepTimes, rows_that_pay
from galley.core.errors import InvalidField

CURVE = StepTimes.measured([(1, 10_000), (8, 12_000), (16, 30_000), (64, 60_000)])


def test_times_are_interpolated() -> None:
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


def test_times_in_use_are_remembered_beside_the_measurement() -> None:
    used, fresh = StepTimes.measured([(1, 10), (4, 40)]), StepTimes.measured([(1, 10), (4, 40)])
    assert used(3) == used(3) == 30
    assert used == fresh


def test_noise_never_makes_more_rows_cheaper() -> None:
    times = StepTimes.measured([(1, 10), (2, 8), (4, 12)])
    assert [times(rows) for rows in (1, 2, 3, 4)] == [10, 10, 11, 12]


@pytest.mark.parametrize("points", [[], [(2, 10)], [(1, 0)], [(1, 10), (1, 11)], [(1, 10), (4, 11), (2, 12)]])
def test_invalid_values_are_refused(points: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidField):
        StepTimes.measured(points)


@settings(max_examples=200)
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
    chosen = rows_that_pay(
        worth, tokens=sessions, rows=rows, step_ns=LiveStepTimes(CURVE), room=room, prompts_ns=0.0
    )

    def rate(count: int) -> float:
        return (sessions + sum(worth[:count])) / CURVE(rows + count)

    possible = range(max(0, min(room, len(worth))) + 1)
    assert chosen in possible
    assert rate(chosen) == pytest.approx(max(rate(count) for count in possible))
    assert rate(chosen) >= rate(0)


def test_a_row_never_makes_a_step_shorter() -> None:
    falling = {1: 100, 2: 100, 3: 60}
    assert (
        rows_that_pay(
            [0.0, 0.0], tokens=1, rows=1, step_ns=lambda rows, drafts: falling[rows], room=2, prompts_ns=0.0
        )
        == 0
    )


def test_unconfirmed_times_stay_as_measured() -> None:
    live = LiveStepTimes(CURVE)
    for rows in (1, 2, 3, 8, 100, 5000):
        live.record(rows, 0, CURVE(rows))
        live.record(rows, 2, CURVE(rows))
        live.record(rows, 0, 0)
    assert [live(rows, 0) for rows in (1, 8, 12, 2000, 5000)] == [
        CURVE(rows) for rows in (1, 8, 12, 2000, 5000)
    ]


def test_a_bad_measurement_is_corrected() -> None:
    # The machine was busy when one row was measured: more rows looked free.
    noisy = StepTimes.measured([(1, 30_000), (8, 30_000), (64, 60_000)])
    live = LiveStepTimes(noisy)
    for _ in range(200):
        live.record(1, 0, 10_000)
        live.record(8, 0, 12_000)
    assert live(1, 0) == pytest.approx(10_000, rel=0.02)
    assert live(8, 0) == pytest.approx(12_000, rel=0.02)
    worth = [0.02] * 7
    assert rows_that_pay(worth, tokens=1, rows=1, step_ns=LiveStepTimes(noisy), room=7, prompts_ns=0.0) == 7
    assert rows_that_pay(worth, tokens=1, rows=1, step_ns=live, room=7, prompts_ns=0.0) == 0


def test_unseen_factors_move_along() -> None:
    live = LiveStepTimes(CURVE)
    for _ in range(200):
        live.record(64, 0, 120_000)
    assert live(1, 0) == pytest.approx(20_000, rel=0.02), "all of the machine may be slower"
    for _ in range(200):
        live.record(1, 0, 10_000)
    assert live(1, 0) == pytest.approx(10_000, rel=0.02)
    assert live(64, 0) == pytest.approx(120_000, rel=0.02)


def test_one_interrupted_step_changes_little() -> None:
    live = LiveStepTimes(CURVE)
    live.record(1, 0, 10_000_000_000)
    assert live(1, 0) < 1.2 * CURVE(1)


def test_draft_rows_have_their_own_factors() -> None:
    live = LiveStepTimes(CURVE)
    for _ in range(200):
        live.record(64, 0, 90_000)
        live.record(64, 16, 110_000)
    assert live(64, 0) == pytest.approx(90_000, rel=0.02)
    assert live(64, 16) == pytest.approx(110_000, rel=0.02)
    assert live(1, 1) == live(1, 0), "as others, where none was seen"


def test_a_draft_row_never_makes_a_step_shorter() -> None:
    """Plain steps may be the slower ones: a draft on the same machine works until its hint is there."""
    live = LiveStepTimes(CURVE)
    for _ in range(200):
        live.record(8, 0, 2 * CURVE(8))
        live.record(8, 4, CURVE(8))
    assert live(8, 4) == live(8, 0)


def test_expensive_draft_rows_are_tried_again() -> None:
    live = LiveStepTimes(CURVE)
    for _ in range(100):
        live.record(8, 0, CURVE(8))
        live.record(8, 4, 3 * CURVE(8))
    assert live(8, 4) > 2.5 * CURVE(8)
    for _ in range(3000):
        live.record(8, 0, CURVE(8))
    assert live(8, 4) == pytest.approx(CURVE(8), rel=0.02)


def test_the_cost_of_a_row_is_that_of_filling_a_plateau() -> None:
    steps = LiveStepTimes(StepTimes.measured([(1, 10_000), (8, 10_007), (9, 18_000), (40, 18_031)]))
    assert steps.added_row_ns(1) <= 1, "the others of the first step are free"
    assert steps.added_row_ns(8) == (18_031 - 10_007) // 32

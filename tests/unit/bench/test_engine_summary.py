"""Test the goals of `make bench-engine`, from what a run measured."""

from __future__ import annotations

import pytest

from bench.engine.summary import goals


@pytest.mark.parametrize(("eight_s", "met"), [(0.0278, True), (0.0299, False)])
def test_eight_rows_of_a_session_are_bounded_by_one_row(*, eight_s: float, met: bool) -> None:
    (goal,) = goals({2: {"small": {"one": [0.0236] * 7, "eight": [eight_s] * 7}}})
    assert (goal.name, goal.met) == ("small", met)
    assert "2 threads" in goal.what

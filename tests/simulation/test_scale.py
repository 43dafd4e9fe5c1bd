"""A small fleet of `make prove-scale`: it carries what the plan says, at the cost that the plan says."""

from __future__ import annotations

import pytest

from tests.simulation.scale.run import Shape, goals_of, run


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_a_fleet_carries_the_planned_load(*, drafted: bool) -> None:
    shape = Shape(gateways=2, drafts=1, targets=1, stores=1, answers=1200, output_tokens=16, drafted=drafted)
    fleet, compared = run(shape)
    goals = goals_of(fleet, compared, "small")
    assert len(goals) == 2 + len(compared) == 7
    assert not [str(goal) for goal in goals if not goal.met]

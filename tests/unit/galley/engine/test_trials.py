"""Which of two ways is taken, from what each took."""

from __future__ import annotations

from itertools import pairwise

import pytest

from galley.engine.cpu.trials import Trials

MARGIN = 1.1


def run(trials: Trials, took: tuple[float, float], steps: int) -> list[int]:
    """Take so many steps, each of which takes as long as its way does; return the ways."""
    ways = []
    for _ in range(steps):
        ways.append(trials.choose())
        trials.record(ways[-1], took[ways[-1]])
    return ways


@pytest.mark.parametrize(("took", "better"), [((10.0, 20.0), 0), ((20.0, 10.0), 1), ((10.0, 9.5), 0)])
def test_both_are_tried_and_then_the_quicker_is_taken(took: tuple[float, float], better: int) -> None:
    ways = run(Trials(MARGIN), took, 12)
    assert ways[:2] == [0, 1]
    assert ways[2:9] == [better] * 7


def test_the_slower_is_tried_again_more_and_more_seldom() -> None:
    ways = run(Trials(MARGIN), (10.0, 20.0), 5000)
    tried = [i for i, way in enumerate(ways) if way == 1]
    pauses = [later - earlier for earlier, later in pairwise(tried[1:])]
    assert pauses[:4] == [16, 32, 64, 128]
    assert max(pauses) == 512
    assert len(tried) / len(ways) < 0.004


@pytest.mark.parametrize("slower", [0, 1])
def test_a_change_of_the_machine_is_noticed(slower: int) -> None:
    trials = Trials(MARGIN)
    before, after = [10.0, 10.0], [10.0, 10.0]
    before[slower], after[1 - slower] = 20.0, 40.0
    run(trials, (before[0], before[1]), 3000)
    ways = run(trials, (after[0], after[1]), 600)
    assert ways[-1] == slower
    assert ways.index(slower) <= 512


def test_one_interrupted_step_changes_nothing() -> None:
    trials = Trials(MARGIN)
    run(trials, (10.0, 20.0), 100)
    trials.record(0, 50.0)
    assert trials.better == 0


def test_a_way_that_was_interrupted_at_first_is_not_given_up() -> None:
    trials = Trials(MARGIN)
    trials.record(trials.choose(), 900.0)
    trials.record(trials.choose(), 20.0)
    assert run(trials, (10.0, 20.0), 30)[-1] == 0

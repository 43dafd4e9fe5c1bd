"""Test the closed form of acceptance, the chances of lists, and the costs of trees."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.acceptance.closed_form import agreement, list_chances, match_chance, optimal_chance
from bench.acceptance.prices import Costs, Visit, first, likely


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_the_closed_form_in_v_log_v_is_the_paper_s(weights: list[tuple[int, int]]) -> None:
    """Daliri et al., arXiv 2408.07978."""
    p, q = (np.array(of, dtype=np.float64) for of in zip(*weights, strict=True))
    if not (p.sum() and q.sum()):
        return
    p, q = p / p.sum(), q / q.sum()
    expected = sum(
        1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(len(p)))
        for i in range(len(p))
        if p[i] > 0 and q[i] > 0
    )
    distance = float(abs(p - q).sum()) / 2
    assert match_chance(p, q) == pytest.approx(expected, abs=1e-12)
    assert optimal_chance(p, q) == pytest.approx(1 - distance, abs=1e-12)
    assert (1 - distance) / (1 + distance) - 1e-12 <= match_chance(p, q) <= 1 - distance + 1e-12


def test_estimated_chances_of_lists_are_the_integral() -> None:
    """Let the target's token i wait e. Then the others before it in the draft's list are independent.

    Token j waits more than e p_j / p_i. It is before i with probability 1 - exp(-e d_j), where d_j =
    max(0, q_j / q_i - p_j / p_i). The integral over e has a closed form for a list of two.
    """
    rng = np.random.default_rng(5)
    p, q = rng.dirichlet(np.full(8, 0.5)), rng.dirichlet(np.full(8, 0.5))
    two = 0.0
    for i in range(8):
        d = np.maximum(0.0, q / q[i] - p / p[i])
        rate = 1 / p[i] + d.sum()
        two += 1 / rate + float(np.sum(1 / (rate - d) - 1 / rate))
    chances = list_chances(p, q, 8, rng, draws=40_000)
    assert chances[:2] == pytest.approx([match_chance(p, q), two], abs=0.012)
    assert list(chances) == sorted(chances)
    assert chances[7] == 1.0


def test_measured_acceptance_agrees_within_its_sampling_interval_only() -> None:
    right = tuple(at % 2 == 0 for at in range(400))
    fair = agreement(right, (0.5,) * 400)
    assert fair.agrees
    assert fair.high - fair.expected == pytest.approx(1.96 * 0.5 / 20, rel=1e-3)
    assert fair.positions == 400
    assert not agreement(right, (0.6,) * 400).agrees
    assert agreement(right, (0.5,) * 400, draws=3).high > fair.high
    with pytest.raises(ValueError, match="proposed none"):
        agreement([], [])


def test_a_visit_costs_its_rows_and_its_drafting_and_gains_what_is_accepted() -> None:
    answers = [[Visit(accepted=(0, 2), depths=(0, 0, 1), survival=(0.6, 0.3, 0.2))] * 7]
    free, drafted = Costs(float), Costs(float, draft_step=0.5)
    # One node, then two tokens a step; three nodes, then three tokens, but for the end.
    assert free.run("", partial(first, 1), answers).speed == pytest.approx(7 / (3 * 2 + 2), abs=1e-4)
    assert drafted.run("", partial(first, 3), answers).speed == pytest.approx(7 / (3 * (4 + 1)), abs=1e-4)
    assert drafted.run("", partial(first, 0), answers).speed == 1.0
    likely_ones = free.run("", partial(likely, 0.3), answers)
    assert likely_ones.draft_tokens == 2.0
    assert likely_ones.speed == pytest.approx(7 / (4 * 3), abs=1e-4)
    assert free.best(answers, 3).choice == "first 0"
    assert Costs(lambda _: 1.0).best(answers, 3).choice == "first 3"

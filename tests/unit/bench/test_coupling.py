"""Test the closed form of acceptance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.coupling.closed_form import Heldout, agreement, match_chance, optimal_chance


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


def test_measured_acceptance_agrees_within_its_sampling_interval_only() -> None:
    right = tuple(at % 2 == 0 for at in range(400))
    fair = agreement([Heldout((0.5,) * 400, (0.6,) * 400, right)])
    assert fair.agrees
    assert fair.high - fair.closed == pytest.approx(1.96 * 0.5 / 20, rel=1e-3)
    assert fair.positions == 400
    assert fair.optimal == pytest.approx(0.6)
    assert not agreement([Heldout((0.6,) * 400, (0.7,) * 400, right)]).agrees
    with pytest.raises(ValueError, match="guessed nothing"):
        agreement([])

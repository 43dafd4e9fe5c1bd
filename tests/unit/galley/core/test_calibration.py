"""Calibration: a chance lies between its prior and the verdicts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.lookup.calibration import MEMORY, Calibration

CHANCES = st.floats(0, 1)
VERDICTS = st.lists(st.booleans(), max_size=200)


@given(CHANCES, st.floats(0.1, 50), VERDICTS)
@settings(max_examples=50)
def test_a_chance_is_between_its_prior_and_the_verdicts(
    prior: float, strength: float, verdicts: list[bool]
) -> None:
    calibration = Calibration([prior, 0.5], strength)
    for verdict in verdicts:
        before = calibration.chance(0)
        calibration.record(0, verdict)
        if prior == verdict:
            assert (
                (calibration.chance(0) >= before - 1e-9)
                if verdict
                else (calibration.chance(0) <= before + 1e-9)
            )
    assert calibration.chance(1) == 0.5
    assert min([prior, *verdicts]) - 1e-9 <= calibration.chance(0) <= max([prior, *verdicts]) + 1e-9


@pytest.mark.parametrize("period", [1, 2, 5])
def test_the_chance_converges_and_follows_a_change(period: int) -> None:
    calibration = Calibration([0.9], 4.0)
    for i in range(4 * MEMORY):
        calibration.record(0, i % period == 0)
    assert calibration.chance(0) == pytest.approx(1 / period, abs=0.03)
    for _ in range(4 * MEMORY):
        calibration.record(0, accepted=False)
    assert calibration.chance(0) < 0.05


def test_a_new_kind_starts_with_the_overall_chance() -> None:
    overall = Calibration([0.9, 0.9], 8.0)
    first = Calibration([0.9, 0.9], 8.0, overall)
    for _ in range(200):
        first.record(0, accepted=False)
    second = Calibration([0.9, 0.9], 8.0, overall)
    assert second.chance(0) == overall.chance(0) < 0.1
    assert second.chance(1) == 0.9

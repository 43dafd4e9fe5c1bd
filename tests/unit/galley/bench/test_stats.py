"""Medians and their bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.bench.summary import median_interval, percentile, ratio_interval


@settings(max_examples=30)
@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=24))
def test_the_interval_lies_around_the_median_and_within_the_values(values: list[float]) -> None:
    result = median_interval(values)
    assert result.median == pytest.approx(float(np.median(values)))
    assert min(values) - 1e-9 <= result.low <= result.median <= result.high <= max(values) + 1e-9
    assert result.count == len(values)


def test_it_is_a_function_of_the_values_and_the_seed() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 16.0, 3.0, 5.0]
    assert median_interval(values, seed=3) == median_interval(values, seed=3)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    draws = np.random.default_rng(7).normal(2.0, 0.3, (60, 24))
    results = [median_interval(list(row)) for row in draws]
    covered = sum(interval.low <= 2.0 <= interval.high for interval in results)
    assert 52 <= covered <= 60


def test_one_pair_says_nothing_about_its_spread() -> None:
    result = median_interval([1.5])
    assert (result.low, result.high) == (1.5, 1.5)


def test_ratios_are_taken_pair_by_pair() -> None:
    # The machine got twice as slow half-way; each pair still says 2.
    assert ratio_interval([20.0, 10.0, 4.0], [10.0, 5.0, 2.0]).median == 2.0
    assert ratio_interval([20.0, 1.0, 10.0], [10.0, 0.0, 5.0]).count == 2
    with pytest.raises(ValueError, match="shorter"):
        ratio_interval([1.0, 2.0], [1.0])


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 100.0], 99) == pytest.approx(99.0)


def test_nothing_has_no_median() -> None:
    with pytest.raises(ValueError, match="values: must not be empty"):
        median_interval([])
    with pytest.raises(ValueError, match="values: must not be empty"):
        percentile([], 50)

"""Sums, growth and quantiles of what services say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.top.scrape import read_samples
from galley.top.series import added, by, growth, mean, quantile, ratio, total

BEFORE = read_samples('galley_a_total{w="x"} 5\ngalley_a_total{w="y"} 1\ngalley_b_total 100\ngalley_g 9\n')


def histogram(**counts: float) -> str:
    bounds = {name.removeprefix("le_").replace("_", "."): count for name, count in counts.items()}
    return "".join(f'galley_h_bucket{{le="{bound}"}} {count}\n' for bound, count in bounds.items())


def test_growth_counts_new_entries_from_zero() -> None:
    after = read_samples('galley_a_total{w="x"} 7\ngalley_a_total{w="z"} 3\ngalley_b_total 100\ngalley_g 2\n')
    grown = growth(BEFORE, after)
    assert by(grown, "galley_a_total", "w") == {"x": 2, "z": 3}
    assert total(grown, "galley_b_total") == 0
    assert "galley_g" not in grown, "a gauge does not grow"


def test_decreased_counter_means_a_restart() -> None:
    after = read_samples('galley_a_total{w="x"} 2\ngalley_b_total 130\n')
    grown = growth(BEFORE, after)
    assert total(grown, "galley_a_total") == 2
    assert total(grown, "galley_b_total") == 130


def test_a_series_that_is_gone_is_no_restart() -> None:
    grown = growth(BEFORE, read_samples("galley_b_total 101\n"))
    assert total(grown, "galley_b_total") == 1
    assert total(grown, "galley_a_total") is None


def test_sums_are_over_the_labels_that_are_asked_for() -> None:
    both = added([BEFORE, read_samples('galley_a_total{w="x",s="n"} 4\n')])
    assert total(both, "galley_a_total") == 10
    assert total(both, "galley_a_total", w="x") == 9
    assert total(both, "galley_a_total", w="x", s="n") == 4
    assert total(both, "galley_a_total", w="nobody") is None
    assert by(both, "galley_a_total", "s") == {"n": 4}


@pytest.mark.parametrize(
    ("part", "whole", "expected"), [(1, 4, 0.25), (0, 4, 0), (1, 0, None), (None, 1, None), (1, None, None)]
)
def test_a_ratio_of_nothing_is_not_known(
    part: float | None, whole: float | None, expected: float | None
) -> None:
    assert ratio(part, whole) == expected


def test_a_mean_is_sum_over_count() -> None:
    output = read_samples("galley_h_sum 6\ngalley_h_count 4\n")
    assert mean(output, "galley_h") == 1.5
    assert mean(read_samples("galley_h_sum 0\ngalley_h_count 0\n"), "galley_h") is None


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.25, 0.5),  # in the middle of the first bucket, which begins at 0
        (0.5, 1.0),
        (0.625, 1.5),
        (0.75, 2.0),
        (0.99, 2.0),  # above the highest bound: that bound
    ],
)
def test_quantiles_are_those_of_prometheus(share: float, expected: float) -> None:
    reported = read_samples(histogram(le_1=40, le_2=60, **{"le_+Inf": 80}))
    assert quantile(reported, "galley_h", share) == pytest.approx(expected)


@pytest.mark.parametrize(
    "reported",
    [
        "",
        histogram(le_1=0, **{"le_+Inf": 0}),
        histogram(le_1=4, le_2=5),
        histogram(**{"le_+Inf": 5}),
        'galley_h_bucket{le="soon"} 3\ngalley_h_bucket{le="NaN"} 3\ngalley_h_bucket{le="+Inf"} 3\n',
        "galley_h_bucket 3\n",
    ],
)
def test_no_quantile_without_observations_or_bounds(reported: str) -> None:
    assert quantile(read_samples(reported), "galley_h", 0.5) is None


@settings(max_examples=100)
@given(
    st.lists(st.floats(0, 100), min_size=1, max_size=60),
    st.lists(st.floats(0.1, 120), min_size=1, max_size=8, unique=True),
    st.floats(0.01, 1.0),
)
def test_a_quantile_lies_in_the_bucket_of_the_observation(
    observed: list[float], bounds: list[float], share: float
) -> None:
    counts = {str(bound): sum(value <= bound for value in observed) for bound in sorted(bounds)}
    lines = [f'galley_h_bucket{{le="{bound}"}} {count}' for bound, count in counts.items()]
    result = quantile(
        read_samples("\n".join([*lines, f'galley_h_bucket{{le="+Inf"}} {len(observed)}'])), "galley_h", share
    )
    exact = sorted(observed)[math.ceil(share * len(observed)) - 1]
    above = min((bound for bound in bounds if exact <= bound), default=max(bounds))
    below = max((bound for bound in bounds if bound < exact), default=0.0)
    assert result is not None
    assert min(below, above) - 1e-9 <= result <= above + 1e-9

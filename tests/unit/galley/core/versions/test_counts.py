"""Counts of versions and the intervals that they give."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from scipy.stats import norm, t

from galley.core.versions.counts import Estimate, VersionCounts, difference, session_counts, widened
from tests.unit.galley.core.versions.sessions import sessions


def test_a_ratio_is_of_the_sums() -> None:
    counts = session_counts(output_tokens=100, accepted=20) + session_counts(output_tokens=300, accepted=240)

    assert counts.gain.value == pytest.approx(260 / 400)
    assert counts.sessions == 2


def test_every_ratio_has_its_own_sums() -> None:
    counts = session_counts(
        output_tokens=100,
        accepted=50,
        proposals=30,
        failures=10,
        round_ns=2_000_000_000,
        plain_ns=3_000_000_000,
        draft_compute_ns=400_000_000,
    )
    counts += counts

    assert counts.speed_up.value == pytest.approx(1.5)
    assert counts.cost_ms.value == pytest.approx(4.0)
    assert counts.failure_rate.value == pytest.approx(0.25)
    # Sessions that are all alike do not spread.
    for ratio in (counts.gain, counts.speed_up, counts.cost_ms, counts.failure_rate):
        assert ratio.error == pytest.approx(0, abs=1e-9)


def test_the_gain_of_each_group_of_principals_has_its_own_sums() -> None:
    counts = session_counts(output_tokens=200, accepted=20, failures=1).of_group(3)
    counts += session_counts(output_tokens=200, accepted=140).of_group(3)
    counts += session_counts(output_tokens=50, accepted=1).of_group(0)
    counts += session_counts(output_tokens=50, accepted=1)

    assert counts.sessions == 4
    assert {group: its.sessions for group, its in counts.groups.items()} == {3: 2, 0: 1}
    gain = counts.groups[3].gain
    assert (gain.value, gain.error, gain.sessions) == pytest.approx((160 / 400, 0.3, 2))


def test_the_error_is_that_of_repeated_samples() -> None:
    chance = random.Random(12)
    samples = [sessions(chance, 40, failures=0.1) for _ in range(300)]

    for ratio in ("gain", "speed_up", "failure_rate"):
        spread = statistics.stdev(getattr(sample, ratio).value for sample in samples)
        claimed = statistics.mean(getattr(sample, ratio).error for sample in samples)
        assert claimed == pytest.approx(spread, rel=0.12), ratio


def test_nothing_is_known_of_no_sessions_and_of_one() -> None:
    assert VersionCounts().gain == Estimate(0.0, 0.0, 0)
    assert VersionCounts().gain.interval(3) == (-math.inf, math.inf)
    assert session_counts(output_tokens=9, accepted=9).gain.interval(3) == (-math.inf, math.inf)


def test_sessions_count_as_many_as_equal_ones_that_would_say_as_much() -> None:
    equal, unlike = VersionCounts(), session_counts(output_tokens=2_000, accepted=900, round_ns=10**9)
    for _ in range(12):
        equal += session_counts(output_tokens=50, accepted=9)
        unlike += session_counts(output_tokens=1, accepted=0)

    assert equal.gain.sessions == pytest.approx(12)
    assert unlike.gain.sessions == pytest.approx(2_012**2 / (2_000**2 + 12))
    assert unlike.gain.interval(3) == (-math.inf, math.inf)
    assert unlike.speed_up.sessions == 1  # the others have no time


def test_few_sessions_widen_an_interval_as_students_t_does() -> None:
    for freedom in (7, 12, 30, 200):
        assert widened(3, freedom) == pytest.approx(t.ppf(norm.cdf(3), freedom), rel=0.03)
    low, high = Estimate(0.5, 0.1, 8).interval(3)
    assert (high - low) / 2 == pytest.approx(0.1 * widened(3, 7))


def test_a_few_sessions_that_are_alike_by_chance_take_the_spread_of_the_others() -> None:
    alike = Estimate(0.4, 0.0, 8)
    others = Estimate(0.5, 0.01, 400)  # 0.2 a session

    assert difference(alike, others).error == pytest.approx(0.2 * math.sqrt(1 / 8 + 1 / 400))
    assert difference(alike, others).sessions == 8

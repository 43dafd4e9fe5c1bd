"""When a verdict is late, and what keeps sessions from being thrown to and fro."""

from __future__ import annotations

import pytest

from galley.core.routing.lateness import LEAST_NS, VerdictTimeout, VerdictTimes

MS = 1_000_000
CURVE = ((1, 20 * MS), (64, 40 * MS), (512, 200 * MS))


def test_a_long_prefill_and_a_full_queue_are_expected() -> None:
    times = VerdictTimes(CURVE)
    assert times.predicted_ns(1) == 220 * MS, "its own pass, after the largest that may be under way"
    assert times.predicted_ns(512) == 400 * MS
    assert times.predicted_ns(8 * 512) == 1800 * MS
    assert times.predicted_ns(8 * 512 + 64) == 1840 * MS
    assert all(times.predicted_ns(rows) <= times.predicted_ns(rows + 1) for rows in range(1, 2000))


@pytest.mark.parametrize("curve", [(), ((2, 5),), ((1, 0),), ((1, 5), (1, 6))])
def test_an_invalid_curve_predicts_nothing(
    curve: tuple[tuple[int, int], ...],
) -> None:
    times = VerdictTimes(curve)
    times.record(times.predicted_ns(7), 10**9)
    assert times.slowed_ns(times.predicted_ns(10**6)) == 0


def test_slow_verdicts_raise_the_expectation() -> None:
    times = VerdictTimes(CURVE)
    predicted = times.predicted_ns(1)
    for _ in range(100):
        times.record(predicted, predicted // 100)
    assert times.slowed_ns(predicted) == predicted
    for _ in range(100):
        times.record(predicted, 4 * predicted)
    assert times.slowed_ns(predicted) == pytest.approx(4 * predicted, rel=0.01)
    for _ in range(100):
        times.record(predicted, 10**6 * predicted)
    assert times.slowed_ns(predicted) <= 16 * predicted, "it is bounded, whatever was seen"


def test_the_timeout_doubles_with_each_move_and_recovers() -> None:
    patience = VerdictTimeout(factor=8)
    assert patience.limit_ns(0) == LEAST_NS
    assert patience.limit_ns(LEAST_NS) == 8 * LEAST_NS
    limits = []
    for _ in range(10):
        patience.record_late()
        limits.append(patience.limit_ns(0) // LEAST_NS)
    assert limits == [2, 4, 8, 16, 32, 64, 64, 64, 64, 64]
    for _ in range(64 * 6 - 1):
        patience.record_in_time()
    assert patience.limit_ns(0) == 2 * LEAST_NS
    for _ in range(65):
        patience.record_in_time()
    assert patience.limit_ns(0) == LEAST_NS

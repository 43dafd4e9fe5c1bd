"""Test how the work of others on our cores is told from our own."""

from __future__ import annotations

import time

import pytest

from bench.quiet import Usage, Watch


@pytest.mark.parametrize(
    ("busy_s", "own_s", "share"), [(4.0, 4.0, 0.0), (8.0, 4.0, 0.2), (20.0, 0.0, 1.0), (3.9, 4.0, 0.0)]
)
def test_what_is_busy_and_not_ours_is_of_others(busy_s: float, own_s: float, share: float) -> None:
    before = Usage(100.0, 2, 50.0, 7.0)
    after = Usage(110.0, 2, 50.0 + busy_s, 7.0 + own_s)
    assert after.others_since(before) == pytest.approx(share)


def test_no_time_has_no_share() -> None:
    now = Usage.now()
    assert now.others_since(now) == 0.0


def test_our_own_work_is_ours() -> None:
    before = Usage.now()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    after = Usage.now()
    assert after.own_s - before.own_s >= 0.3
    assert after.busy_s - before.busy_s >= 0.25  # the kernel counts in ticks


def test_shares_are_reported_by_name() -> None:
    watch = Watch()
    watch.note("a")
    watch.note("a")
    watch.note("b")
    report = watch.report()
    assert set(report) == {"a", "b"}
    assert all(0.0 <= shares["median"] <= shares["max"] <= 1.0 for shares in report.values())

"""Worked examples of the running means of drafts, to the digit."""

from __future__ import annotations

import pytest

from galley.core.session.draft_statistics import DraftStatistics, SharedStatistics


@pytest.mark.parametrize(
    ("weight", "right", "alpha"),
    [
        (0.25, True, 0.6 + 0.25 * 0.4),
        (0.25, False, 0.6 - 0.25 * 0.6),
        (0.01, True, 0.6 + 0.4 / 6),  # the first token, beside a prior of five
    ],
)
def test_a_token_moves_alpha_by_its_weight(weight: float, right: bool, alpha: float) -> None:
    statistics = DraftStatistics(alpha=0.6)
    statistics.record_token(weight, right=right)
    assert statistics.tokens == 1
    assert statistics.alpha == pytest.approx(alpha)


def test_the_prior_fades() -> None:
    statistics = DraftStatistics(alpha=0.6, tokens=4)
    statistics.record_token(0.01, right=True)
    assert statistics.alpha == pytest.approx(0.6 + 0.4 / 10)


def test_recovery_is_a_running_mean() -> None:
    statistics = DraftStatistics(recovery=0.25)
    statistics.record_recovery(0.2, right=True)
    assert statistics.recovery == pytest.approx(0.4)
    statistics.record_recovery(0.2, right=False)
    assert statistics.recovery == pytest.approx(0.32)


def test_a_session_of_its_own_kind_has_weight() -> None:
    alike, differing = DraftStatistics(alpha=0.6), DraftStatistics(alpha=0.6)
    for _ in range(2):
        differing.record_deviation(0.8, 0.5, right=True)
        alike.record_deviation(0.8, 0.5, right=False)
    assert differing.deviation_squared == pytest.approx(0.0325)
    assert differing.deviation_explained == pytest.approx(0.0625)
    assert (differing.deviation_weight, alike.deviation_weight) == (1.0, 0.0)
    differing.record_deviation(0.8, 0.5, right=False)
    assert differing.deviation_explained == pytest.approx(-0.02875)


def test_proposals_measure_drafting_and_reading() -> None:
    statistics = DraftStatistics()
    statistics.record_time(4, unread=1, compute_ns=8_000, sessions=2, weight=0.5)
    assert (statistics.token_ns, statistics.share_ns, statistics.others_ns) == (2_000, 1_000, 250)
    statistics.record_time(4, unread=4, compute_ns=16_000, sessions=2, weight=0.5)
    assert (statistics.token_ns, statistics.share_ns, statistics.others_ns) == (3_000, 1_500, 625)
    assert statistics.read_ns == 0

    statistics.record_time(4, unread=10, compute_ns=42_000, sessions=2, weight=0.5)
    assert statistics.read_ns == 1_500, "30,000 ns, of which half are the session's, for ten tokens"
    statistics.record_time(4, unread=10, compute_ns=1_000, sessions=2, weight=0.5)
    assert statistics.read_ns == 1_500 / 2**10, "each token has the weight"
    assert (statistics.token_ns, statistics.share_ns, statistics.others_ns) == (3_000, 1_500, 625)


def test_reading_is_not_measured_before_drafting() -> None:
    statistics = DraftStatistics()
    statistics.record_time(4, unread=10, compute_ns=42_000, sessions=1, weight=0.5)
    assert (statistics.read_ns, statistics.token_ns, statistics.reading_ns) == (0, 0, 0)


def test_reading_is_estimated_until_it_is_measured() -> None:
    statistics = DraftStatistics(share_ns=800.0)
    assert statistics.reading_ns == 100
    statistics.read_ns = 70.0
    assert statistics.reading_ns == 70


def test_the_share_of_proposals_with_new_tokens_is_a_running_mean() -> None:
    statistics = DraftStatistics(nonempty_rate=0.8)
    statistics.record_outcome(0.25, nonempty=False)
    assert statistics.nonempty_rate == pytest.approx(0.6)
    statistics.record_outcome(0.25, nonempty=True)
    assert statistics.nonempty_rate == pytest.approx(0.7)


def test_verdicts_measure_how_much_of_hints_is_verified() -> None:
    statistics = DraftStatistics(verified_rate=1.0, verified_len=4.0)
    statistics.record_verdict(0, 0.5)
    assert (statistics.verified_rate, statistics.verified_len) == (0.5, 4)
    statistics.record_verdict(6, 0.5)
    assert (statistics.verified_rate, statistics.verified_len) == (0.75, 5)


def test_the_load_is_a_running_mean_over_all_sessions() -> None:
    shared = SharedStatistics()
    shared.record_step(10_000, sessions=4, row_ns=300, confirmed=3)
    assert (shared.step_ns, shared.share_ns, shared.row_ns) == (10_000, 2_500, 300)
    assert shared.confirmed_per_step == pytest.approx(1.1)
    shared.record_step(20_000, sessions=2, row_ns=100, confirmed=1)
    assert (shared.step_ns, shared.share_ns, shared.row_ns) == pytest.approx((10_500, 2_875, 290))
    assert shared.confirmed_per_step == pytest.approx(1.095)
    shared.record_proposal(1_000, compute_ns=400)
    assert (shared.latency_ns, shared.message_ns) == (1_000, 600)
    shared.record_proposal(2_000, compute_ns=3_000)
    assert (shared.latency_ns, shared.message_ns) == pytest.approx((1_050, 570))


def test_a_workload_starts_without_a_budget() -> None:
    shared = SharedStatistics()
    shared.for_strategy("model").budget_ns = 5.0
    assert shared.for_workload("model", "code").budget_ns == 0


def test_a_workload_starts_with_the_means_of_its_strategy() -> None:
    shared = SharedStatistics()
    overall = shared.for_strategy("model")
    overall.record_token(0.25, right=True)
    workload = shared.for_workload("model", "code")
    assert (workload.alpha, workload.tokens) == (overall.alpha, 0)
    workload.record_token(0.25, right=False)
    assert workload.alpha < overall.alpha
    assert shared.for_workload("model", "code") is workload
    adapted = shared.for_workload("model", "code", "sql")
    assert adapted.alpha == overall.alpha, "an adapter learns for itself"
    assert shared.for_workload("model", "code", "sql") is adapted

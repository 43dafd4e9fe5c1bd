"""How many draft tokens a session requests: worked examples of what they cost and gain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from galley.core.session.draft_statistics import DraftStatistics, SharedStatistics
from galley.core.session.speculation import Speculation
from tests.fakes.session_world import spec

MS = 1_000_000
PLENTY = 100


def shared(alpha: float = 0.5, **workload: float) -> tuple[SharedStatistics, DraftStatistics]:
    """Return statistics in which the workload of `spec()` has these means."""
    here = SharedStatistics()
    statistics = here.for_workload(spec().strategy, spec().workload)
    for name, value in {"alpha": alpha, **workload}.items():
        setattr(statistics, name, value)
    return here, statistics


def fixed(k: int, here: SharedStatistics) -> Speculation:
    return Speculation(spec(k=k, auto=False), here)


def auto(k: int, here: SharedStatistics) -> Speculation:
    """Return a session that requests chains; `test_speculation_width.py` has the trees."""
    return Speculation(spec(k=k, auto=True, width=1), here)


def first(speculation: Speculation, room: int = PLENTY, unread: int = 0) -> int:
    """Return how many tokens are requested while none is ready."""
    return speculation.tokens_to_draft(0, 1.0, room, unread)


@pytest.mark.parametrize(("weight", "alpha"), [(0.0, 0.5), (0.5, 0.7), (1.0, 0.9)])
def test_alpha_lies_between_workload_and_session(weight: float, alpha: float) -> None:
    here, statistics = shared(0.9)
    speculation = auto(8, here)
    statistics.alpha, statistics.deviation_squared = 0.5, 0.02
    statistics.deviation_explained = 0.02 * weight
    assert speculation.alpha == pytest.approx(alpha)


@pytest.mark.parametrize(("recovery", "can"), [(0.49, False), (0.5, True)])
def test_drafts_recover_where_they_did_in_half_of_all_cases(recovery: float, can: bool) -> None:
    here, _ = shared(recovery=recovery)
    assert auto(8, here).can_recover is can


def test_a_fixed_k_is_requested_as_it_is() -> None:
    here, _ = shared()
    assert first(fixed(6, here)) == 6
    assert first(fixed(6, here), room=2) == 2
    assert first(fixed(0, here)) == 0
    assert fixed(6, here).tokens_to_draft(4, 0.5, 1, 0) == 1
    here.share_ns = 1.0
    assert fixed(6, here).tokens_to_draft(4, 0.5, PLENTY, 0) == 2, "nothing is worth it, but k is asked for"


@pytest.mark.parametrize("room", [0, -1])
def test_nothing_is_requested_without_room(room: int) -> None:
    here, _ = shared()
    assert first(auto(8, here), room=room) == 0


def test_a_request_for_less_than_half_of_a_proposal_waits() -> None:
    here, _ = shared()
    assert fixed(4, here).tokens_to_draft(4, 0.5, 2, 0) == 2
    assert fixed(4, here).tokens_to_draft(4, 0.5, 1, 0) == 0


def test_as_many_are_ready_as_two_steps_can_take() -> None:
    here, _ = shared()
    assert fixed(4, here).tokens_to_draft(7, 0.5, PLENTY, 0) == 2, "2 * 4, and the bonus token between"
    assert fixed(4, here).tokens_to_draft(9, 0.5, PLENTY, 0) == 0


@pytest.mark.parametrize(
    ("alpha", "token_ns", "count"),
    [
        # (1 + alpha + ... + alpha^count) / (1000 + count * token_ns) is highest there.
        (0.5, 100, 2),
        (0.8, 100, 6),
        (0.8, 200, 4),
        (0.2, 300, 0),
        # 0.95 would still pay, but a step is over by then.
        (0.95, 600, 2),
    ],
)
def test_a_proposal_confirms_the_most_tokens_per_time(alpha: float, token_ns: float, count: int) -> None:
    here, _ = shared(alpha, token_ns=token_ns)
    here.step_ns, here.share_ns = 1000, 1000 * MS  # whatever is drafted is worth its request
    assert first(auto(16, here)) == count


def test_a_slow_link_takes_what_is_confirmed_meanwhile() -> None:
    here, _ = shared(0.5)
    here.step_ns, here.message_ns = 1000, 1000
    # Two steps of 1 + 1/2 + ... + 1/16 tokens.
    assert first(fixed(4, here)) == 4 + 4


@pytest.mark.parametrize(
    ("share_ns", "row_ns", "others_ns", "count"),
    [
        # Tokens gain 0.5, 0.25, 0.125 ... of the share, less 1.05 rows; in all more than a request's 0.4 ms.
        (MS, 0, 0, 8),
        (MS, 100_000, 60_000, 3),
        # The fourth is for the step after: 1/8 * (0.5 - 0.105) ms, of which others lose 0.04 ms.
        (MS, 100_000, 40_000, 4),
        (400_000, 0, 0, 0),
        (402_000, 0, 0, 8),
    ],
)
def test_tokens_ahead_are_worth_their_cost(share_ns: int, row_ns: int, others_ns: int, count: int) -> None:
    here, _ = shared(0.5, others_ns=others_ns)
    here.share_ns, here.row_ns = share_ns, row_ns
    assert fixed(8, here).tokens_to_draft(8, 1.0, PLENTY, 0) == count


def test_auto_requests_nothing_ahead_that_is_not_worth_it() -> None:
    here, _ = shared(0.5)
    here.share_ns = 400_000
    assert auto(8, here).tokens_to_draft(1, 0.5, PLENTY, 0) == 0


@pytest.mark.parametrize(("confirmed", "count"), [(1.0, 4), (4.0, 0)])
def test_the_cores_that_tokens_ahead_take_cost_what_a_step_confirms(confirmed: float, count: int) -> None:
    # Tokens gain 0.5, 0.25, 0.125 ... ms, less 0.0525 ms for each token that a step confirms.
    here, _ = shared(0.5, share_ns=50_000)
    here.share_ns, here.contention, here.confirmed_per_step = MS, 1.0, confirmed
    assert fixed(8, here).tokens_to_draft(8, 1.0, PLENTY, 0) == count


@pytest.mark.parametrize("rate", ["nonempty_rate", "verified_rate"])
def test_what_is_often_empty_or_not_verified_is_worth_less(rate: str) -> None:
    for value, count in ((0.72, 3), (0.71, 0)):  # of 0.56 ms
        here, _ = shared(0.5, others_ns=60_000, **{rate: value})
        here.share_ns, here.row_ns = MS, 100_000
        assert fixed(8, here).tokens_to_draft(8, 1.0, PLENTY, 0) == count


def test_a_prompt_that_the_draft_has_to_read_costs() -> None:
    for unread, count in ((25_000, 4), (27_000, 0)):  # a quarter of their time, over 24 steps
        here, _ = shared(0.9, read_ns=10_000)
        here.share_ns = MS
        assert first(auto(8, here), unread=unread) == count


def test_a_prompt_that_took_several_proposals_to_read_measures_no_drafting() -> None:
    here, workload = shared()
    speculation = auto(8, here)
    speculation.record_proposal(0, 2400, 400 * MS, 400 * MS, 1)  # not read at the deadline
    speculation.record_proposal(0, 1, MS, MS, 1)
    speculation.record_proposal(4, 1, 100 * MS, 100 * MS, 1)  # 80 ms of them to read the rest
    assert (workload.token_ns, workload.share_ns, workload.read_ns) == (0, 0, 0)
    speculation.record_proposal(4, 1, 20 * MS, 20 * MS, 1)
    assert (workload.token_ns, workload.share_ns, workload.read_ns) == (5 * MS, 5 * MS, 0)


def test_a_proposal_without_tokens_for_few_does_not_keep_drafting_from_being_measured() -> None:
    here, workload = shared()
    speculation = auto(8, here)
    speculation.record_proposal(0, 2, MS, MS, 1)
    speculation.record_proposal(4, 2, 20 * MS, 20 * MS, 1)
    assert workload.token_ns == 5 * MS


def test_a_prompt_that_was_being_read_for_a_proposal_that_was_given_up_measures_no_reading() -> None:
    here, workload = shared(token_ns=5 * MS, read_ns=MS)
    speculation = auto(8, here)
    speculation.record_given_up(0)
    speculation.record_proposal(4, 1004, 60 * MS, 60 * MS, 1)  # of 1,000 ms, most have passed
    assert (workload.token_ns, workload.read_ns) == (5 * MS, MS)
    speculation.record_proposal(4, 1000, 2020 * MS, 2020 * MS, 1)
    assert workload.read_ns == pytest.approx(2 * MS, rel=0.001)


def test_a_proposal_that_was_given_up_does_not_keep_drafting_from_being_measured() -> None:
    here, workload = shared()
    speculation = auto(8, here)
    speculation.record_given_up(0)
    speculation.record_proposal(4, 4, 20 * MS, 20 * MS, 1)
    assert workload.token_ns == 5 * MS


def test_few_requests_are_made_before_a_step_is_measured() -> None:
    here, _ = shared()
    assert [first(auto(8, here)) for _ in range(6)] == [4, 4, 4, 4, 0, 0]
    assert first(fixed(8, here)) == 8
    here.record_step(20 * MS, 1, 0, 1)
    assert first(auto(8, here)) == 4


@pytest.mark.parametrize(
    ("row_ms", "contention", "count"), [(47, 0.0, 4), (48, 0.0, 0), (37, 1.0, 1), (38, 1.0, 0), (42, 0.5, 1)]
)
def test_a_token_must_be_worth_its_row_and_the_cores_that_it_takes(
    row_ms: int, contention: float, count: int
) -> None:
    here, _ = shared(0.5, share_ns=10 * MS)
    here.share_ns, here.row_ns, here.contention = 100 * MS, row_ms * MS, contention
    assert first(auto(8, here)) == count


def test_no_draft_is_probed_where_no_token_can_be_worth_its_row() -> None:
    here, workload = priced(row_ms=10)
    workload.alpha, workload.budget_ns = 0.99, 1000 * MS
    speculation = auto(8, here)
    for _ in range(4):
        speculation.record_token(right=True)
    assert first(speculation) == 0
    here.row_ns = 5 * MS
    assert first(speculation) > 0, "as soon as the load has fallen"


def priced(row_ms: int = 5, **workload: float) -> tuple[SharedStatistics, DraftStatistics]:
    """Return a load at which drafts of this quality are not worth it, but perfect ones would be.

    Each verdict saves 0.05 ms for probes, half of it for its workload.
    """
    here, statistics = shared(0.1, **workload)
    here.share_ns, here.row_ns = 10 * MS, row_ms * MS
    return here, statistics


def judge(speculation: Speculation, verdicts: int) -> None:
    for _ in range(verdicts):
        speculation.record_verdict(offered=False, verified=0)


@pytest.mark.parametrize("sessions", [1, 8])
def test_the_probes_of_all_sessions_take_a_share_of_the_time_of_all_steps(sessions: int) -> None:
    here, _ = priced()
    each = [auto(8, here) for _ in range(sessions)]
    probes = 0
    for _ in range(1600 // sessions):
        for speculation in each:
            judge(speculation, 1)
            probes += first(speculation) > 0
    assert probes == 200, "of 0.4 ms each, in 1600 shares of 10 ms"


@pytest.mark.parametrize(
    ("row_ms", "contention", "verdicts"),
    [(5, 0.0, 29), (8, 0.0, 42), (5, 0.75, 38), (0, 0.0, 12)],  # the last is not below a tenth
)
def test_the_more_rows_or_cores_cost_the_more_a_probe_costs(
    row_ms: int, contention: float, verdicts: int
) -> None:
    # 0.4 ms, and what counts of 2 ms: four tokens, and twenty to read.
    here, workload = priced(row_ms, read_ns=50_000, share_ns=MS / 4)
    here.contention, workload.nonempty_rate = contention, 0.0
    speculation = auto(8, here)
    judge(speculation, verdicts - 1)
    assert first(speculation, unread=20) == 0
    judge(speculation, 1)
    assert first(speculation, unread=20) == 4


def test_a_probe_that_took_longer_than_expected_delays_the_next() -> None:
    here, _ = priced()
    speculation = auto(8, here)
    judge(speculation, 8)
    assert first(speculation) == 4
    speculation.record_proposal(4, 1, 5 * MS, 4 * MS, 1)
    # Rows cost 0.525 of a token, so 2.1 ms of its 4 count, and as much is expected of the next.
    judge(speculation, 42 + 50 - 1)
    assert first(speculation) == 0
    judge(speculation, 1)
    assert first(speculation) == 4


def test_a_proposal_after_a_lost_probe_is_not_charged_as_one() -> None:
    here, _ = priced()
    speculation = auto(8, here)
    judge(speculation, 8)
    assert first(speculation) == 4
    speculation.record_given_up(MS)
    here.row_ns = 0.0
    assert first(speculation) > 0, "worth it now"
    before = here.for_strategy(spec().strategy).budget_ns
    speculation.record_proposal(4, 1, 50 * MS, 40 * MS, 1)
    assert here.for_strategy(spec().strategy).budget_ns == before


def test_a_lost_probe_costs_what_the_draft_may_have_worked() -> None:
    here, workload = priced(read_ns=400_000, share_ns=MS)
    overall = here.for_strategy(spec().strategy)
    workload.budget_ns = overall.budget_ns = 1_000 * MS
    here.for_workload(spec().strategy, "other").alpha = 0.1
    speculation, other = auto(8, here), Speculation(spec(k=8, auto=True, workload="other"), here)
    assert first(speculation, unread=20_000) == 4  # 8 s of the draft
    assert overall.budget_ns < -1_000 * MS
    speculation.record_given_up(160 * MS)
    # Rows cost 0.525 of a token, so as much of its work counts.
    assert workload.budget_ns + overall.budget_ns == pytest.approx((2_000 - 0.4 - 0.525 * 160) * MS)
    judge(other, 8)
    assert first(other) == 4


def test_a_lost_probe_costs_no_more_than_was_expected() -> None:
    here, workload = priced(share_ns=MS)
    overall = here.for_strategy(spec().strategy)
    speculation = auto(8, here)
    judge(speculation, 100)
    assert first(speculation) == 4
    before = workload.budget_ns + overall.budget_ns
    speculation.record_given_up(10_000 * MS)
    assert workload.budget_ns + overall.budget_ns == before


def test_a_workload_with_long_prompts_saves_up_for_its_probe() -> None:
    here, _ = priced()
    for workload in ("short", "long"):
        statistics = here.for_workload(spec().strategy, workload)
        statistics.alpha, statistics.read_ns = 0.1, 100_000
    short, long = (Speculation(spec(k=8, auto=True, workload=name), here) for name in ("short", "long"))
    probes = {short: 0, long: 0}
    for _ in range(200):
        for speculation, unread in ((short, 0), (long, 32)):
            judge(speculation, 1)
            probes[speculation] += first(speculation, unread=unread) > 0
    assert probes[long] == 2


def test_a_probe_that_costs_more_than_can_be_saved_leaves_a_debt() -> None:
    here, workload = priced(read_ns=100_000, share_ns=MS)
    speculation = auto(8, here)
    unread = 100_000  # 10 s of the draft
    while not first(speculation, unread=unread):
        judge(speculation, 1000)
        assert workload.budget_ns < 2_000 * MS
    assert here.for_strategy(spec().strategy).budget_ns < -1_000 * MS
    judge(speculation, 1000)
    assert not first(speculation, unread=unread)


def test_probes_that_were_right_are_repeated_at_once_but_not_for_long() -> None:
    here, _ = priced(row_ms=9)
    speculation = auto(8, here)
    for _ in range(4):
        assert first(speculation) == 0
        speculation.record_token(right=True)
    assert [first(speculation) for _ in range(10)] == [4] * 8 + [0, 0]
    speculation.record_token(right=False)
    judge(speculation, 8)
    assert first(speculation) == 0, "until those are paid"


def test_a_bad_version_of_the_draft_leaves_the_statistics_of_others_as_they_are() -> None:
    here, statistics = shared(0.9)
    before = replace(statistics), replace(here.for_strategy(spec().strategy))
    bad = Speculation(spec(k=8, auto=True, width=1), here, "bad")
    for _ in range(100):
        bad.record_proposal(8, 1, MS, MS, 1)
        bad.record_token(right=False)

    assert (statistics, here.for_strategy(spec().strategy)) == before
    assert here.for_workload(spec().strategy, spec().workload, version="bad").alpha < 0.1
    assert here.for_workload(spec().strategy, spec().workload, version="new").alpha > 0.1

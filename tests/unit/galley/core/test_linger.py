"""Waiting for a hint: only where it pays, never long, and seldom again after it was in vain."""

from __future__ import annotations

import pytest

from galley.core.content import prefix_hash
from galley.core.cost.model import LiveStepTimes
from galley.core.hints import Hint
from galley.core.scheduler.hint_statistics import PRIOR_ALPHA, AcceptanceEstimate, HintTiming
from galley.core.scheduler.linger import ExpectedHint, linger_until
from galley.core.scheduler.messages import Extend
from galley.core.scheduler.request import ActiveRequest, SessionStatistics
from galley.core.scheduler.scheduler import Linger
from galley.core.step import GrowingTokens, StepPlan
from tests.fakes.scheduler_world import FLAT, MS, Bench, request, result_of, true_answer

PROMPT = [3, 1, 4]
ANSWER = true_answer(PROMPT, 400)


def teach(bench: Bench, item: int, delay_ns: int, rounds: int = 6) -> int:
    count = 0
    for _ in range(rounds):
        plan = bench.scheduler.plan(bench.now)
        if isinstance(plan, Linger):
            assert bench.now + delay_ns <= plan.until_ns, "it waits as long as hints take, at least"
        else:
            assert isinstance(plan, StepPlan)
            (answer,) = bench.finish(plan)
            count += len(result_of(answer).tokens)
        bench.now += delay_ns
        send_hint(bench, item, count)
        plan = bench.scheduler.plan(bench.now)
        assert isinstance(plan, StepPlan), "a hint is there"
        (answer,) = bench.finish(plan)
        count += len(result_of(answer).tokens)
    return count


def send_hint(bench: Bench, item: int, count: int) -> None:
    known = [*PROMPT, *ANSWER[:count]]
    hint = Hint(len(known), prefix_hash(known), tuple(ANSWER[count : count + 4]))
    bench.extend(item, hint=hint, hint_due=True)


def bench_of(max_linger_ns: int = 50 * MS) -> tuple[Bench, int]:
    bench = Bench(max_linger_ns=max_linger_ns, blocks=256)
    return bench, bench.submit(request(PROMPT, credit=900))


def test_lingers_for_a_hint_that_arrives_soon() -> None:
    bench, item = bench_of()
    count = teach(bench, item, 2 * MS)
    lingering = bench.scheduler.plan(bench.now)
    assert isinstance(lingering, Linger)
    assert bench.now + 2 * MS <= lingering.until_ns < bench.now + FLAT(1)
    bench.now += 2 * MS
    send_hint(bench, item, count)
    (answer,) = bench.step()
    assert result_of(answer).accepted == 4


def test_never_lingers_when_disabled_or_nothing_is_known() -> None:
    bench, item = bench_of(max_linger_ns=0)
    teach(bench, item, 2 * MS)
    assert isinstance(bench.scheduler.plan(bench.now), StepPlan)
    bench, item = bench_of()
    bench.extend(item, hint_due=True)
    bench.step()
    assert isinstance(bench.scheduler.plan(bench.now), StepPlan), "no hint has ever come"


def test_does_not_linger_while_no_hint_is_due() -> None:
    bench, item = bench_of()
    teach(bench, item, 2 * MS)
    bench.extend(item, hint_due=False)
    assert isinstance(bench.scheduler.plan(bench.now), StepPlan)


def test_a_waiting_prompt_ends_lingering() -> None:
    bench, item = bench_of()
    teach(bench, item, 2 * MS)
    assert isinstance(bench.scheduler.plan(bench.now), Linger)
    bench.submit(request([1, 2, 3], session="other"))
    assert isinstance(bench.scheduler.plan(bench.now), StepPlan)


def test_trust_falls_with_each_missing_hint() -> None:
    bench, item = bench_of()
    teach(bench, item, 2 * MS)
    waits = []
    for _ in range(12):
        plan = bench.scheduler.plan(bench.now)
        waits.append(isinstance(plan, Linger))
        if isinstance(plan, Linger):
            bench.now = plan.until_ns
            plan = bench.scheduler.plan(bench.now)
        assert isinstance(plan, StepPlan), "the same pass is not put off twice"
        bench.finish(plan)
        bench.extend(item, hint_due=True)
    assert waits[0]
    assert not any(waits[6:]), "after some it gives up"


def test_after_a_missing_hint_only_an_extension_allows_lingering() -> None:
    bench, item = bench_of()
    teach(bench, item, 2 * MS)
    plan = bench.scheduler.plan(bench.now)
    assert isinstance(plan, Linger)
    bench.now = plan.until_ns
    bench.step()
    assert isinstance(bench.scheduler.plan(bench.now), StepPlan)


def test_lingering_is_bounded() -> None:
    bench, item = bench_of(max_linger_ns=1 * MS)
    teach(bench, item, 2 * MS)
    assert isinstance(bench.scheduler.plan(bench.now), StepPlan)


def test_the_first_hint_after_a_result_alone_measures_the_delay() -> None:
    active = ActiveRequest(1, request(PROMPT, credit=9), SessionStatistics(), 0)
    active.tokens = GrowingTokens(PROMPT)
    for now in (2 * MS, 30 * MS):
        active.extend(Extend(hint=Hint(3, prefix_hash(PROMPT), (7, 8))), now)
    assert active.statistics.hint_timing.delay_ns == 2 * MS


def test_acceptance_begins_as_a_mean_with_a_prior_of_five_tokens() -> None:
    acceptance = AcceptanceEstimate()
    acceptance.record_token(right=True)
    assert acceptance.alpha == pytest.approx((5 * PRIOR_ALPHA + 1) / 6)
    acceptance.record_token(right=False)
    assert acceptance.alpha == pytest.approx((5 * PRIOR_ALPHA + 1) / 7)


def test_a_result_reports_how_long_its_step_waited() -> None:
    bench, item = bench_of()
    count = teach(bench, item, 4 * MS)
    bench.now += 1 * MS
    assert isinstance(bench.scheduler.plan(bench.now), Linger)
    bench.now += 2 * MS
    send_hint(bench, item, count)
    (answer,) = bench.step()
    assert (result_of(answer).linger_ns, result_of(answer).queue_ns) == (2 * MS, 3 * MS)


def test_idle_time_after_a_wait_is_no_wait() -> None:
    bench, item = bench_of()
    teach(bench, item, 2 * MS)
    assert isinstance(bench.scheduler.plan(bench.now), Linger)
    waited_ns = bench.scheduler.counts.linger_ns
    bench.scheduler.cancel(item)
    assert bench.scheduler.plan(bench.now) is None
    bench.now += 1000 * MS
    bench.submit(request(PROMPT, session="next"))
    (answer,) = bench.step()
    assert (bench.scheduler.counts.linger_ns, result_of(answer).linger_ns) == (waited_ns, 0)


def test_the_first_delay_is_the_mean_with_half_of_it_as_deviation() -> None:
    """RFC 6298, section 2.2; the margin is two deviations."""
    timing = HintTiming()
    timing.record_arrival(100, 4)
    assert timing.expected_at(1000) == (1100, 1200)


def test_the_wait_for_one_token_that_costs_nothing_more() -> None:
    # 1.9 tokens in 11 ms, or 2 in 20.
    coming = ExpectedHint(at_ns=1 * MS, mean_ns=1 * MS, length=1, alpha=0.9, trust=1.0)
    assert (
        linger_until([coming], sessions=1, now=0, latest=50 * MS, step_ns=lambda _rows, _drafts: 10 * MS)
        == MS
    )


def test_lingering_must_pay_for_all_sessions_of_the_step() -> None:
    due = ExpectedHint(at_ns=4 * MS, mean_ns=4 * MS, length=4, alpha=0.8, trust=1.0)

    def until(sessions: int) -> int | None:
        return linger_until([due], sessions=sessions, now=0, latest=50 * MS, step_ns=LiveStepTimes(FLAT))

    assert until(1) == 4 * MS
    assert until(16) is None
    many = [due] * 16
    assert linger_until(many, sessions=16, now=0, latest=50 * MS, step_ns=LiveStepTimes(FLAT)) == 4 * MS


def test_lingers_for_the_rest_when_some_hints_have_arrived() -> None:
    def until(coming: int, at_ns: int) -> int | None:
        due = [ExpectedHint(at_ns=at_ns, mean_ns=at_ns, length=4, alpha=0.8, trust=1.0)] * coming
        here = [0.8, 0.64, 0.5, 0.4] * (16 - coming)
        return linger_until(due, sessions=16, now=0, latest=50 * MS, step_ns=LiveStepTimes(FLAT), ready=here)

    assert until(8, 1 * MS) == 1 * MS
    assert until(1, 1 * MS) is None, "all others pay for it"
    assert until(8, 9 * MS) is None


def test_step_starts_once_all_awaited_hints_have_arrived() -> None:
    bench, first = bench_of()
    count = teach(bench, first, 2 * MS)
    plan = bench.scheduler.plan(bench.now)
    assert isinstance(plan, Linger)
    bench.now += MS
    again = bench.scheduler.plan(bench.now)
    assert isinstance(again, Linger)
    assert again.until_ns == plan.until_ns, "made out once"
    send_hint(bench, first, count)
    assert isinstance(bench.scheduler.plan(bench.now), StepPlan)


def test_acceptance_follows_what_is_seen() -> None:
    acceptance = AcceptanceEstimate()
    assert acceptance.alpha == PRIOR_ALPHA
    for _ in range(80):
        acceptance.record_token(right=False)
        acceptance.record_recovery(right=True)
    assert acceptance.alpha < 0.05
    assert acceptance.recovery > 0.95
    for _ in range(80):
        acceptance.record_token(right=True)
    assert acceptance.alpha > 0.95
    assert acceptance.survival(2) == [acceptance.alpha, acceptance.alpha**2]


def test_calibration_never_makes_a_draft_certain() -> None:
    lucky = AcceptanceEstimate()
    for _ in range(200):
        lucky.record_token(right=True, predicted=0.8)
    far = lucky.calibrated([0.8**i for i in range(1, 9)])
    assert far == sorted(far, reverse=True)
    assert far[-1] < 0.85


def test_the_delay_is_learnt_with_a_margin() -> None:
    habits = HintTiming()
    assert habits.expected_at(0) == (float("inf"), float("inf"))
    for delay in (10, 12, 8, 10, 11, 9) * 5:
        habits.record_arrival(delay, 4)
    mean_ns, at_ns = habits.expected_at(0)
    assert 9 < mean_ns < at_ns < 16


def test_predicted_chances_are_calibrated_by_outcomes() -> None:
    boasting = AcceptanceEstimate()
    for i in range(200):
        boasting.record_token(right=i % 5 == 0, predicted=0.9)
    assert [round(chance, 1) for chance in boasting.calibrated([0.9, 0.81])] == [0.2, 0.0]
    modest = AcceptanceEstimate()
    for _ in range(200):
        modest.record_token(right=True, predicted=0.5)
    assert modest.calibrated([0.5, 0.25]) == pytest.approx([0.975, 0.95], abs=0.01)
    assert modest.calibrated([0.99, 0.98]) == pytest.approx([0.99, 0.98]), "a draft may be surer itself"
    fair = AcceptanceEstimate()
    assert fair.calibrated([0.5, 0.2, 0.0, 0.0]) == pytest.approx([0.5, 0.2, 0.0, 0.0])

"""Admission to slots, and retry delays after which a slot is free."""

from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from galley.core.admission.admission import (
    ANONYMOUS,
    Admission,
    AdmissionSlot,
    Principal,
    PrincipalLimits,
    TokenBucket,
)
from galley.core.errors import Overloaded

SECOND = 1_000_000_000


def named(name: str, **limits: float) -> Principal:
    return Principal(name, PrincipalLimits(**limits))  # type: ignore[arg-type]  # the test's own


def refused(admission: Admission, principal: Principal, tokens: int = 1, now: int = 0) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        admission.enter(principal, tokens, now)
    assert 0 < caught.value.retry_after_s <= 60
    return caught.value


def entered(admission: Admission, principal: Principal, count: int, now: int = 0) -> list[AdmissionSlot]:
    return [admission.enter(principal, 1, now) for _ in range(count)]


def test_a_principal_has_no_more_streams_than_its_own_limit() -> None:
    admission, mine = Admission(10), named("me", max_sessions=2)
    first, _ = entered(admission, mine, 2)
    assert "2 streams of me" in str(refused(admission, mine))
    entered(admission, named("you"), 3)
    admission.leave(first, 1)
    entered(admission, mine, 1, now=2)
    refused(admission, mine, now=2)


def test_a_slot_is_released_once() -> None:
    admission, mine = Admission(2), named("me", max_sessions=1)
    [slot] = entered(admission, mine, 1)
    admission.leave(slot, 1)
    entered(admission, mine, 1, now=1)
    admission.leave(slot, 2)
    assert admission.held == 1
    refused(admission, mine, now=2)


def test_one_principal_may_hold_all_slots_while_nobody_waits() -> None:
    admission = Admission(4)
    entered(admission, named("me"), 4)
    assert "4 streams of this gateway" in str(refused(admission, named("me")))


def test_slots_pass_to_waiting_principals_up_to_their_share() -> None:
    admission, greedy, late = Admission(4), named("greedy"), named("late")
    slots = entered(admission, greedy, 4)
    refused(admission, late)
    for _ in range(2):
        admission.leave(slots.pop(), SECOND)
        assert "share is 2" in str(refused(admission, greedy, now=SECOND))
        entered(admission, late, 1, now=SECOND)
        refused(admission, late, now=SECOND)
    admission.leave(slots.pop(), SECOND)
    assert "share is 2" in str(refused(admission, late, now=SECOND))
    entered(admission, greedy, 1, now=SECOND)


def test_calls_without_a_session_do_not_shorten_the_retry_delay() -> None:
    admission = Admission(1)
    for used in (1, None, None):
        slot = admission.enter(ANONYMOUS, 1, 0)
        slot.used = used
        admission.leave(slot, 0 if used is None else 30 * SECOND)
    entered(admission, ANONYMOUS, 1, now=40 * SECOND)
    assert refused(admission, ANONYMOUS, now=40 * SECOND).retry_after_s == pytest.approx(30)


def test_a_principal_that_does_not_retry_stops_waiting() -> None:
    admission, greedy = Admission(2), named("greedy")
    slots = entered(admission, greedy, 2)
    back_s = refused(admission, named("gone")).retry_after_s
    admission.leave(slots.pop(), 1)
    refused(admission, greedy, now=1)
    entered(admission, greedy, 1, now=int((back_s + 6) * SECOND))


def test_anonymous_callers_count_as_one_principal() -> None:
    admission = Admission(2)
    slots = entered(admission, ANONYMOUS, 2)
    refused(admission, ANONYMOUS)
    admission.leave(slots[0], 1)
    entered(admission, ANONYMOUS, 1, now=1)


def test_unused_tokens_are_returned_at_the_end() -> None:
    admission, mine = Admission(10), named("me", tokens_per_s=1, burst_tokens=100)
    slot = admission.enter(mine, 100, 0)
    assert refused(admission, mine, 50).retry_after_s == pytest.approx(50)
    slot.used = 30
    admission.leave(slot, 0)
    admission.leave(admission.enter(mine, 70, 0), 0)
    refused(admission, mine, 71)


def test_a_prompt_counts_and_may_leave_debt() -> None:
    admission, mine = Admission(10), named("me", tokens_per_s=10, burst_tokens=100)
    slot = admission.enter(mine, 100, 0)
    admission.charge(slot, 50, 0)
    assert refused(admission, mine).retry_after_s == pytest.approx(5.1)


def test_a_further_reservation_is_returned_with_the_first() -> None:
    admission, mine = Admission(10), named("me", tokens_per_s=1, burst_tokens=100)
    slot = admission.enter(mine, 0, 0)
    admission.reserve(slot, 60, 0)
    with pytest.raises(Overloaded) as caught:
        admission.reserve(slot, 50, 0)
    assert caught.value.retry_after_s == pytest.approx(50)
    admission.leave(slot, 0)
    admission.enter(mine, 100, 0)


def test_a_principal_in_debt_waits_even_for_no_tokens() -> None:
    admission, mine = Admission(10), named("me", tokens_per_s=10, burst_tokens=100)
    admission.charge(admission.enter(mine, 100, 0), 50, 0)
    assert refused(admission, mine, 0).retry_after_s == pytest.approx(5)
    admission.enter(mine, 0, 5 * SECOND + 1)


def test_more_than_the_burst_is_taken_from_a_full_bucket() -> None:
    admission, mine = Admission(10), named("me", tokens_per_s=10, burst_tokens=100)
    slot = admission.enter(mine, 1000, 0)
    slot.used = 1000
    admission.leave(slot, 0)
    assert TokenBucket(10, 100, 0).try_take(1000, 0) == 0
    assert refused(admission, mine, 1, now=31 * SECOND).retry_after_s == pytest.approx(59.1)


def test_the_default_burst_is_a_minutes_worth() -> None:
    assert PrincipalLimits(tokens_per_s=2).burst == 120
    assert PrincipalLimits(tokens_per_s=0.001).burst == 1


def test_new_limits_apply_from_the_next_call() -> None:
    admission = Admission(10)
    before = admission.enter(named("me", max_sessions=5), 1, 0)
    less = named("me", max_sessions=1)
    refused(admission, less)
    admission.leave(before, 1)
    admission.enter(less, 1, 1)
    refused(admission, less, now=1)


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3 * SECOND), st.floats(0, 1)), max_size=40),
    st.sampled_from([1.0, 7.0, 300.0]),
    st.sampled_from([1, 50, 1000]),
)
@example(calls=[(157, 0, 0.2109375), (1, 501, 0.0)], per_s=1.0, burst=1)
@settings(max_examples=60)
def test_retry_delays_are_exact_and_keep_the_rate(
    calls: list[tuple[int, int, float]], per_s: float, burst: int
) -> None:
    bucket, now, used = TokenBucket(per_s, burst, 0), 0, 0
    for tokens, pause_ns, share in calls:
        now += pause_ns
        wait_ns = bucket.try_take(tokens, now)
        if wait_ns:
            now += wait_ns
            assert bucket.try_take(tokens, now) == 0, "retry_after has passed"
        came = int(tokens * share)
        bucket.spend(came - tokens, now)
        used += came
        # More than the burst is taken once.
        assert used <= burst + per_s * now / SECOND + max(0, tokens - burst) + 1


def test_refused_callers_find_a_slot_when_they_retry() -> None:
    rng = random.Random(5)
    admission, length_ns = Admission(10), 2 * SECOND
    events = [(rng.randrange(SECOND), caller, "enters") for caller in range(200)]
    heapq.heapify(events)
    attempts = served = 0
    slots: dict[int, AdmissionSlot] = {}
    while events:
        now, caller, what = heapq.heappop(events)
        if what == "leaves":
            slot = slots.pop(caller)
            slot.used = 1
            admission.leave(slot, now)
            served += 1
            continue
        attempts += 1
        try:
            slots[caller] = admission.enter(ANONYMOUS, 1, now)
        except Overloaded as error:
            heapq.heappush(events, (now + int(error.retry_after_s * SECOND), caller, "enters"))
        else:
            heapq.heappush(events, (now + length_ns + rng.randrange(SECOND // 10), caller, "leaves"))
    assert served == 200
    assert admission.held == 0
    assert attempts < 4 * 200, "most retries found a slot"

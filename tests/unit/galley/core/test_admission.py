"""Admission to slots, and retry delays after which a slot is free."""

from __future__ import annotations

import heapq
import random

import pytest

from galley.core.admission.admission import (
    ANONYMOUS,
    SATURATED,
    TOKEN_PREFIX,
    Admission,
    AdmissionSlot,
    Principal,
    PrincipalLimits,
)
from galley.core.errors import Overloaded

SECOND = 1_000_000_000


def named(name: str, **limits: float) -> Principal:
    return Principal(name, PrincipalLimits(**limits))  # type: ignore[arg-type]  # the test's own


def refused(admission: Admission, principal: Principal, now: int = 0) -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        admission.enter(principal, now)
    assert 0 < caught.value.retry_after_s <= 60
    return caught.value


def entered(admission: Admission, principal: Principal, count: int, now: int = 0) -> list[AdmissionSlot]:
    return [admission.enter(principal, now) for _ in range(count)]


def test_a_principal_has_no_more_streams_than_its_own_limit() -> None:
    admission, mine = Admission(10), named("me", max_sessions=2)
    first, _ = entered(admission, mine, 2)
    assert "2 streams of me" in str(refused(admission, mine))
    entered(admission, named("you"), 3)
    admission.leave(first, 1)
    entered(admission, mine, 1, now=2)
    refused(admission, mine, now=2)


@pytest.mark.parametrize(
    ("principal", "kind"),
    [(ANONYMOUS, "anonymous"), (named(f"{TOKEN_PREFIX}me"), "token"), (named("me"), "key")],
)
def test_logs_name_the_kind_of_a_principal(principal: Principal, kind: str) -> None:
    assert principal.kind == kind


def test_a_saturated_gateway_admits_nobody_and_spreads_the_retries() -> None:
    admission, mine = Admission(10), named("me")
    slots = entered(admission, mine, 4)
    waits = set()
    for _ in range(3):
        with pytest.raises(Overloaded) as caught:
            admission.enter(named("you"), 0, is_saturated=True)
        assert caught.value.reason == SATURATED
        waits.add(caught.value.retry_after_s)
    assert len(waits) == 3
    assert admission.held == len(slots), "the open streams stay"
    entered(admission, named("you"), 1, now=1)


def test_a_slot_is_released_once() -> None:
    admission, mine = Admission(2), named("me", max_sessions=1)
    [slot] = entered(admission, mine, 1)
    admission.leave(slot, 1)
    entered(admission, mine, 1, now=1)
    admission.leave(slot, 2)
    assert admission.held == 1
    refused(admission, mine, now=2)


def test_accounts_are_forgotten_only_when_idle() -> None:
    admission, mine, waiting = Admission(1025), named("me", max_sessions=1), named("waiting")
    [slot] = entered(admission, mine, 1)
    entered(admission, named("other"), 1024)
    refused(admission, waiting)
    for number in range(1024):
        refused(admission, named(f"stranger {number}"))
    assert "1 streams of me" in str(refused(admission, mine, now=SECOND))
    admission.leave(slot, SECOND)
    entered(admission, mine, 1, now=SECOND)


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
        slot = admission.enter(ANONYMOUS, 0)
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


def test_new_limits_apply_from_the_next_call() -> None:
    admission = Admission(10)
    before = admission.enter(named("me", max_sessions=5), 0)
    less = named("me", max_sessions=1)
    refused(admission, less)
    admission.leave(before, 1)
    admission.enter(less, 1)
    refused(admission, less, now=1)


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
            slots[caller] = admission.enter(ANONYMOUS, now)
        except Overloaded as error:
            heapq.heappush(events, (now + int(error.retry_after_s * SECOND), caller, "enters"))
        else:
            heapq.heappush(events, (now + length_ns + rng.randrange(SECOND // 10), caller, "leaves"))
    assert served == 200
    assert admission.held == 0
    assert attempts < 4 * 200, "most retries found a slot"

"""When a breaker lets whom through."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.routing.breaker import FAILURES, FIRST_PAUSE_NS, LONGEST_PAUSE_NS, WINDOW, Breaker, State


def opened(breaker: Breaker, now: int = 0) -> int:
    for count in range(1, WINDOW + 1):
        if breaker.record_failure(breaker.begin(now), now):
            return count
    raise AssertionError("it does not open")


def test_opens_after_half_of_the_last_attempts_failed() -> None:
    breaker = Breaker()
    assert opened(breaker) == FAILURES
    assert breaker.state(0) is State.OPEN
    mixed = Breaker()
    for _ in range(FAILURES - 1):
        assert not mixed.record_failure(mixed.begin(0), 0)
        assert not mixed.record_success(mixed.begin(0))
    assert mixed.record_failure(mixed.begin(0), 0), "the last of four failures among seven"


@pytest.mark.parametrize(("successes", "opens"), [(4, True), (5, False)])
def test_failures_count_among_the_last_eight_attempts(successes: int, opens: bool) -> None:
    breaker = Breaker()
    breaker.record_failure(0, 0)
    for _ in range(successes):
        breaker.record_success(0)
    breaker.record_failure(0, 0)
    breaker.record_failure(0, 0)
    assert breaker.record_failure(0, 0) is opens


def test_rare_failures_do_not_open_it() -> None:
    breaker = Breaker()
    for number in range(100):
        if number % 3 == 0:
            assert not breaker.record_failure(breaker.begin(0), 0)
        else:
            breaker.record_success(breaker.begin(0))
    assert breaker.state(0) is State.CLOSED


def test_after_its_pause_one_probe_decides() -> None:
    breaker = Breaker()
    opened(breaker)
    assert not breaker.can_begin(FIRST_PAUSE_NS - 1)
    assert breaker.can_begin(FIRST_PAUSE_NS)
    probe = breaker.begin(FIRST_PAUSE_NS)
    assert not breaker.can_begin(FIRST_PAUSE_NS), "one at a time"
    assert breaker.record_success(probe)
    assert breaker.state(FIRST_PAUSE_NS) is State.CLOSED
    assert opened(breaker, FIRST_PAUSE_NS) == FAILURES, "what was before is forgotten"


def test_each_probe_that_fails_doubles_the_pause_up_to_a_bound() -> None:
    breaker, now = Breaker(), 0
    opened(breaker)
    pauses = []
    for _ in range(8):
        began = now
        while not breaker.can_begin(now):
            now += FIRST_PAUSE_NS
        pauses.append(now - began)
        assert breaker.record_failure(breaker.begin(now), now)
    assert [pause / FIRST_PAUSE_NS for pause in pauses] == [1, 2, 4, 8, 16, 16, 16, 16]
    assert pauses[-1] == LONGEST_PAUSE_NS


def test_a_cancelled_probe_allows_another() -> None:
    breaker = Breaker()
    opened(breaker)
    breaker.record_cancelled(breaker.begin(FIRST_PAUSE_NS))
    assert breaker.can_begin(FIRST_PAUSE_NS)


def test_outcomes_of_earlier_attempts_are_ignored() -> None:
    breaker = Breaker()
    old = breaker.begin(0)
    opened(breaker)
    assert not breaker.record_success(old)
    assert not breaker.record_failure(old, FIRST_PAUSE_NS)
    assert breaker.state(FIRST_PAUSE_NS) is State.HALF_OPEN
    refused = Breaker()
    opened(refused)
    assert not refused.record_success(refused.begin(0)), "nor what was not allowed"
    assert refused.state(0) is State.OPEN


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["fail", "succeed", "leave"]), st.integers(0, 10**9)), max_size=80))
def test_closes_after_any_history_once_attempts_succeed(steps: list[tuple[str, int]]) -> None:
    breaker, now = Breaker(), 0
    for what, later in steps:
        now += later
        attempt = breaker.begin(now)
        if what == "fail":
            breaker.record_failure(attempt, now)
        elif what == "succeed":
            breaker.record_success(attempt)
        else:
            breaker.record_cancelled(attempt)
    now += LONGEST_PAUSE_NS
    breaker.record_success(breaker.begin(now))
    assert breaker.state(now) is State.CLOSED

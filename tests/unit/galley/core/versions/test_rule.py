"""The rule that promotes a version of a draft, or rolls it back."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import reduce
from operator import add

import pytest

from galley.core.versions.counts import VersionCounts, session_counts
from galley.core.versions.rule import Outcome, Rule, decide
from galley.core.versions.split import GROUPS, Split, SplitBy
from tests.unit.galley.core.versions.sessions import sessions

SPLIT = Split(canary="new", share=0.1)
RULE = Rule(tokens=5_000)


def _trial(seed: int, canary: float, *, most: int = 600, batch: int = 5) -> tuple[Outcome, int]:
    """Look after each batch of the canary's sessions; return the decision and the sessions until then."""
    chance = random.Random(seed)
    stable_counts = canary_counts = VersionCounts()
    for _ in range(0, most, batch):
        stable_counts += sessions(chance, 9 * batch)
        canary_counts += sessions(chance, batch, gain=canary)
        outcome = decide(SPLIT, stable_counts, canary_counts, RULE).outcome
        if outcome is not Outcome.KEEP:
            return outcome, canary_counts.sessions
    return Outcome.KEEP, canary_counts.sessions


def test_a_bad_canary_goes_back_after_few_sessions() -> None:
    for seed in range(20):
        outcome, taken = _trial(seed, 0.1)
        assert outcome is Outcome.ROLL_BACK
        assert taken <= 15


def test_a_better_canary_is_promoted_once_it_has_its_tokens() -> None:
    for seed in range(10):
        outcome, taken = _trial(seed, 0.65)
        assert outcome is Outcome.PROMOTE
        assert taken >= 30  # of 5,000 tokens


def test_an_equal_canary_is_seldom_decided_however_often_it_is_looked_at() -> None:
    outcomes = [_trial(seed, 0.5, most=300, batch=15)[0] for seed in range(40)]

    assert outcomes.count(Outcome.KEEP) >= 37


def test_a_worse_canary_is_never_promoted() -> None:
    outcomes = {_trial(seed, 0.42, most=700, batch=20)[0] for seed in range(10)}

    assert outcomes == {Outcome.ROLL_BACK}


def test_a_draw_ends_after_ten_times_the_tokens_and_not_before() -> None:
    chance = random.Random(3)
    stable, canary = sessions(chance, 900), sessions(chance, 499)
    assert canary.output_tokens < 50_000
    assert decide(SPLIT, stable, canary, RULE).outcome is Outcome.KEEP

    decision = decide(SPLIT, stable, canary + sessions(chance, 20), RULE)
    assert decision.outcome is Outcome.NO_GAIN
    assert "no gain" in decision.reason


@pytest.mark.parametrize("arm", ["stable", "canary"])
def test_a_few_sessions_decide_nothing(arm: str) -> None:
    chance = random.Random(4)
    few, many = sessions(chance, 7, gain=0.0), sessions(chance, 500)
    stable, canary = (few, many) if arm == "stable" else (many, few)

    assert decide(SPLIT, stable, canary, RULE).outcome is Outcome.KEEP


def test_failures_end_a_trial_even_of_a_better_version() -> None:
    chance = random.Random(5)
    stable = sessions(chance, 300)
    decision = decide(SPLIT, stable, sessions(chance, 60, gain=0.9, failures=0.2), RULE)

    assert decision.outcome is Outcome.ROLL_BACK
    assert "failures" in decision.reason
    # A few are no reason.
    assert decide(SPLIT, stable, sessions(chance, 60, gain=0.9, failures=0.01), RULE).outcome is (
        Outcome.PROMOTE
    )


@pytest.mark.parametrize("by", ["tenant", "workload"])
def test_failures_end_a_trial_in_which_the_canary_has_all_tenants_or_workloads(by: SplitBy) -> None:
    chance, split = random.Random(7), Split(canary="new", share=0.1, by=by)
    failing, good = sessions(chance, 60, failures=0.2), sessions(chance, 60)

    for stable in (VersionCounts(), sessions(chance, 1)):
        assert decide(split, stable, failing, RULE).outcome is Outcome.ROLL_BACK
    assert decide(split, VersionCounts(), good, RULE).outcome is Outcome.KEEP
    assert decide(split, VersionCounts(), sessions(chance, 7, failures=0.9), RULE).outcome is Outcome.KEEP


def test_a_version_that_gains_tokens_but_loses_time_goes_back() -> None:
    chance = random.Random(6)
    decision = decide(SPLIT, sessions(chance, 300), sessions(chance, 60, gain=0.7, speed_up=1.2), RULE)

    assert decision.outcome is Outcome.ROLL_BACK
    assert "slower" in decision.reason


def test_a_version_that_is_a_little_slower_is_not_promoted() -> None:
    chance = random.Random(7)
    stable = sessions(chance, 4_000)
    slower = sessions(chance, 2_000, gain=0.55, speed_up=1.485)  # by one part in a hundred

    assert decide(SPLIT, stable, slower, Rule(tokens=5_000, draw=1_000)).outcome is Outcome.KEEP


def test_a_version_that_is_worse_for_some_principals_goes_back() -> None:
    chance = random.Random(9)
    stable, canary = sessions(chance, 900).of_group(1), sessions(chance, 90, gain=0.7).of_group(1)
    assert decide(SPLIT, stable, canary, RULE).outcome is Outcome.PROMOTE

    stable += sessions(chance, 200, gain=0.6).of_group(2)
    decision = decide(SPLIT, stable, canary + sessions(chance, 15, gain=0.2).of_group(2), RULE)
    assert decision.outcome is Outcome.ROLL_BACK
    assert "worse for some principals" in decision.reason
    assert "in group 2" in decision.reason
    # A small loss is no reason.
    other = canary + sessions(chance, 2_000, gain=0.59).of_group(2)
    assert decide(SPLIT, stable, other, RULE).outcome is Outcome.PROMOTE


def test_a_version_that_may_be_worse_for_some_principals_is_promoted_later() -> None:
    chance = random.Random(10)
    stable, canary = sessions(chance, 900).of_group(1), sessions(chance, 90, gain=0.7).of_group(1)
    stable += sessions(chance, 100).of_group(2)
    doubtful = canary + sessions(chance, 4, gain=0.2).of_group(2)
    decision = decide(SPLIT, stable, doubtful, RULE)
    assert decision.outcome is Outcome.KEEP
    assert "perhaps worse for some principals" in decision.reason
    # One session says nothing, and a long trial ends.
    for counts in (
        canary + sessions(chance, 1, gain=0.0).of_group(2),
        doubtful + sessions(chance, 600, gain=0.7).of_group(1),
    ):
        assert decide(SPLIT, stable, counts, RULE).outcome is Outcome.PROMOTE


def test_groups_of_principals_seldom_end_a_trial_by_chance() -> None:
    ended = 0
    for seed in range(6):
        chance, stable, canary = random.Random(seed), VersionCounts(), VersionCounts()
        for number in range(480):
            stable += sessions(chance, 4).of_group(number % GROUPS)
            canary += sessions(chance, 1).of_group(number % GROUPS)
            if number % 16 == 0 and "some principals" in decide(SPLIT, stable, canary, RULE).reason:
                ended += 1
    assert not ended


@pytest.mark.parametrize("by", ["tenant", "workload"])
def test_arms_of_unlike_traffic_are_not_compared_finely(by: SplitBy) -> None:
    chance = random.Random(8)
    split = Split(canary="new", share=0.1, by=by)
    stable = sessions(chance, 2_000)

    for gain in (0.35, 0.5, 0.8):
        assert decide(split, stable, sessions(chance, 600, gain=gain), RULE).outcome is Outcome.KEEP
    for bad in (sessions(chance, 60, gain=0.1), sessions(chance, 60, failures=0.3)):
        assert decide(split, stable, bad, RULE).outcome is Outcome.ROLL_BACK


def test_a_version_whose_rounds_all_read_prompts_is_judged_by_its_tokens() -> None:
    stable = canary = VersionCounts()
    for tokens in range(90, 110):
        stable += session_counts(output_tokens=tokens, accepted=tokens // 2)
        canary += session_counts(output_tokens=tokens, accepted=tokens // 5)

    assert decide(SPLIT, stable, canary, RULE).outcome is Outcome.ROLL_BACK


def _shorts(number: int) -> VersionCounts:
    """Return sessions of one token: their only round read the prompt, so that none asked a draft."""
    one = session_counts(output_tokens=1, accepted=0)
    return reduce(add, [one] * number)


def _long(tokens: int, gain: float, speed_up: float = 1.5, failures: int = 0) -> VersionCounts:
    accepted, taken = round(gain * tokens), tokens * 10_000_000
    return session_counts(
        output_tokens=tokens,
        accepted=accepted,
        proposals=0 if failures else 20,
        failures=failures,
        round_ns=taken,
        plain_ns=round(taken * speed_up),
    )


@pytest.mark.parametrize(
    ("stable", "canary"),
    [
        (_long(200, 0.5), _long(200, 0.5, speed_up=1.4)),
        (_long(200, 0.5), _long(200, 0.5, failures=1)),
        (_long(200, 0.6), _long(200, 0.4)),
        (_long(20_000, 0.5), _long(20_000, 0.6)),
    ],
    ids=["slower", "fails", "worse", "better"],
)
def test_one_long_session_among_short_ones_decides_nothing(
    stable: VersionCounts, canary: VersionCounts
) -> None:
    decision = decide(SPLIT, stable + _shorts(8), canary + _shorts(8), RULE)

    assert decision.outcome is Outcome.KEEP
    # The same said by eight sessions of each does.
    eight = decide(SPLIT, reduce(add, [stable] * 8), reduce(add, [canary] * 8), RULE)
    assert eight.outcome is not Outcome.KEEP


def test_a_version_whose_speed_is_not_known_yet_is_not_promoted() -> None:
    """A few long rounds, which waited, are most of the time; the tokens are of many sessions."""
    stable = reduce(add, [_long(400, 0.5, speed_up=1.4)] * 40)
    canary = reduce(add, [_long(400, 0.7, speed_up=1.4)] * 39)
    slow = _long(400, 0.7, speed_up=0.7)
    slow = replace(slow, round_ns=slow.round_ns * 100, round_sq=slow.round_sq * 100**2)

    assert decide(SPLIT, stable, canary, RULE).outcome is Outcome.PROMOTE
    assert canary.speed_up.sessions >= 8 > (canary + slow).speed_up.sessions
    assert decide(SPLIT, stable, canary + slow, RULE).outcome is Outcome.KEEP


def test_a_long_trial_whose_gain_is_not_known_goes_on() -> None:
    giant = _long(60_000, 0.5)
    canary = giant + reduce(add, [_long(100, 0.5)] * 20)

    assert decide(SPLIT, reduce(add, [_long(100, 0.5)] * 200), canary, RULE).outcome is Outcome.KEEP

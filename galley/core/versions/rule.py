"""The rule that ends the trial of a draft's version: promote it, or roll back.

It is applied again after each batch of sessions, so its bounds are far out: z = 3. The first look at which a
bound is crossed decides. A canary that is worse goes back after few sessions. One that is better stays a
canary until it has given `tokens` output tokens.

Sessions are drawn for the canary, whatever draft then serves them, so both arms have the same traffic. That
holds for draws of sessions only. Where tenants or workloads are drawn, the arms differ in their traffic: then
only failures, and an acceptance that is less than half, end a trial. If nearly all of them fall to the
canary, its failures alone do.

The sums of all sessions are mostly those of the busiest principals. So a canary also goes back if it gains
clearly less for a group of principals, at z = 4, since there are many groups. At z = 1 it is not promoted
yet.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from galley.core.versions.counts import Estimate, VersionCounts, difference
from galley.core.versions.split import Split

DEFAULT_TRIAL_TOKENS = 20_000


class Outcome(enum.Enum):
    """The end of a trial, or none. `NO_GAIN` is a roll-back, too: the canary is not worse, and not better."""

    KEEP = "keep"
    PROMOTE = "promote"
    ROLL_BACK = "roll_back"
    NO_GAIN = "no_gain"


@dataclass(frozen=True, slots=True)
class Rule:
    """The bounds of a trial.

    The canary can be promoted after `tokens` output tokens, and after `draw` times as many without a decision
    it is rolled back. No ratio decides before each arm has `min_sessions` effective sessions of it. `z` is of
    comparisons over all sessions. Those within a group of principals end a trial by `group_z`, and put a
    promotion off by `doubt_z`. `failure_margin` is the share of failed requests, `speed_margin` the part of
    the stable versions' speed-up, and `group_margin` the share of the output tokens of a group, by which a
    canary may be worse.
    """

    tokens: int = DEFAULT_TRIAL_TOKENS
    z: float = 3.0
    group_z: float = 4.0
    doubt_z: float = 1.0
    min_sessions: int = 8
    draw: int = 10
    failure_margin: float = 0.02
    speed_margin: float = 0.02
    group_margin: float = 0.02


@dataclass(frozen=True, slots=True)
class Decision:
    outcome: Outcome
    reason: str


def decide(split: Split, stable: VersionCounts, canary: VersionCounts, rule: Rule) -> Decision:
    """Return what becomes of the canary, and why."""
    sessions = min(stable.sessions, canary.sessions)
    if split.by != "session" and stable.sessions < rule.min_sessions and _fails(canary, rule):
        return _roll_back(f"failures: {canary.failure_rate.value:.3f} ± {canary.failure_rate.error:.3f}")
    if sessions < rule.min_sessions:
        return Decision(Outcome.KEEP, f"{sessions} of {rule.min_sessions} sessions in the smaller arm")
    gains = f"gain {_compared(canary.gain, stable.gain)}"
    failures = _difference(canary.failure_rate, stable.failure_rate, rule.min_sessions)
    if failures.interval(rule.z)[0] > rule.failure_margin:
        return _roll_back(f"more failures: {_compared(canary.failure_rate, stable.failure_rate)}")
    if split.by != "session":
        return _decide_unlike(split, stable, canary, rule, gains)
    return _decide_alike(stable, canary, rule, gains)


def _decide_alike(stable: VersionCounts, canary: VersionCounts, rule: Rule, gains: str) -> Decision:
    """Decide between arms of the same traffic."""
    gain_low, gain_high = _difference(canary.gain, stable.gain, rule.min_sessions).interval(rule.z)
    if gain_high < 0:
        return _roll_back(f"worse: {gains}")
    if worse := _worse_of_group(stable, canary, rule, rule.group_z, rule.min_sessions):
        return _roll_back(f"worse for some principals: gain {worse}")
    speed_high = _difference(canary.speed_up, stable.speed_up, rule.min_sessions).interval(rule.z)[1]
    if speed_high < -rule.speed_margin * stable.speed_up.value:
        return _roll_back(f"slower: speed-up {_compared(canary.speed_up, stable.speed_up)}; {gains}")
    if canary.output_tokens < rule.tokens:
        return Decision(Outcome.KEEP, f"{canary.output_tokens} of {rule.tokens} tokens; {gains}")
    known = min(canary.gain.sessions, stable.gain.sessions)
    timed = min(canary.speed_up.sessions, stable.speed_up.sessions)  # 0 if all rounds read prompts
    if known < rule.min_sessions or 0 < timed < rule.min_sessions:
        return Decision(Outcome.KEEP, f"too few effective sessions; {gains}")
    is_long = canary.output_tokens >= rule.draw * rule.tokens
    if gain_low > 0 and speed_high >= 0:
        if not is_long and (worse := _worse_of_group(stable, canary, rule, rule.doubt_z, 2)):
            return Decision(Outcome.KEEP, f"better, but perhaps worse for some principals: gain {worse}")
        return Decision(Outcome.PROMOTE, f"better: {gains}")
    if is_long:
        return _roll_back(f"no gain after {canary.output_tokens} tokens: {gains}", Outcome.NO_GAIN)
    return Decision(Outcome.KEEP, f"undecided after {canary.output_tokens} tokens; {gains}")


def _worse_of_group(
    stable: VersionCounts, canary: VersionCounts, rule: Rule, z: float, fewest_sessions: int
) -> str:
    """Return the gains of a group of principals for whom the canary is worse at `z`, empty if none is."""
    for group, its in canary.groups.items():
        beside = stable.groups.get(group, VersionCounts())
        if _difference(its.gain, beside.gain, fewest_sessions).interval(z)[1] < -rule.group_margin:
            return f"{_compared(its.gain, beside.gain)} in group {group}"
    return ""


def _difference(canary: Estimate, stable: Estimate, fewest_sessions: int) -> Estimate:
    """Return the difference of two ratios, with an infinite error if one is of fewer effective sessions."""
    found = difference(canary, stable)
    return found if found.sessions >= fewest_sessions else replace(found, error=math.inf)


def _fails(canary: VersionCounts, rule: Rule) -> bool:
    rate = canary.failure_rate
    return rate.sessions >= rule.min_sessions and rate.interval(rule.z)[0] > rule.failure_margin


def _decide_unlike(
    split: Split, stable: VersionCounts, canary: VersionCounts, rule: Rule, gains: str
) -> Decision:
    """Decide between arms of unlike traffic."""
    enough = min(canary.gain.sessions, stable.gain.sessions) >= rule.min_sessions
    if enough and canary.gain.interval(rule.z)[1] < stable.gain.interval(rule.z)[0] / 2:
        return _roll_back(f"less than half: {gains}")
    return Decision(Outcome.KEEP, f"each {split.by} is drawn, so that people decide; {gains}")


def _roll_back(reason: str, outcome: Outcome = Outcome.ROLL_BACK) -> Decision:
    return Decision(outcome, reason)


def _compared(canary: Estimate, stable: Estimate) -> str:
    return (
        f"{canary.value:.3f} ± {canary.error:.3f} against {stable.value:.3f} ± {stable.error:.3f} "
        f"({canary.sessions:.0f} and {stable.sessions:.0f} effective sessions)"
    )

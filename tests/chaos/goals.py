"""The goals of `make chaos`, and whether a run met them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median, quantiles

from bench.harness import Goal, at_most
from galley.bench.summary import median_interval
from tests.chaos.disturbances import CUT, CUTS, KILL, POOLS, Plan, count_of, killed, pool_of
from tests.chaos.links import STORE
from tests.chaos.trial import DRAFT_KILL, Measured

SPARED_S = 3.0
"""Longest wait for a token after a kill, where another replica or gateway can stand in."""
STORE_S = 1.0
"""Longest wait for a token after a kill of the store, less the time of its restart."""
DRAFT_MS = 10.0
_MS = 1000
_P95 = 94


def goals(measured: Sequence[Measured], plan: Plan, streams: int, answers: int, problem: str) -> list[Goal]:
    """Return one line for each goal; `problem` is what ended the run early, or empty."""
    found = [_killed(measured, plan, streams), _cut(measured, plan, streams), _unharmed(answers, problem)]
    for pool in ("target", "gateway"):
        waits = [one.worst_s for one in _of(measured, pool)]
        what = f"wait of the slowest stream for its next token after a {pool} is killed, another stands in"
        found += [_longest(f"{pool}-killed", what, waits, SPARED_S)] if waits else []
    found += _draft(measured)
    away = [one.worst_s - one.restart_s for one in _of(measured, STORE)]
    what = "the same after the store is killed, beyond its restart"
    found += [_longest("store-killed", what, away, STORE_S)] if away else []
    return found


def _of(measured: Sequence[Measured], pool: str) -> list[Measured]:
    return [one for one in measured if one.kind == killed(pool).kind]


def _killed(measured: Sequence[Measured], plan: Plan, streams: int) -> Goal:
    struck = [one for each in measured for one in each.event if one.what == KILL]
    kills = Counter(pool_of(one.where[0]) for one in struck)
    said = ", ".join(f"{pool} {kills[pool]}" for pool in POOLS)
    enough = kills.total() >= plan.kills and kills["target"] >= plan.target_kills
    met = enough and all(kills[pool] for pool in POOLS)
    bound = f">= {plan.kills} (target {plan.target_kills})"
    return Goal("kills", f"{KILL}s under {streams} streams", f"{kills.total()} ({said})", bound, met)


def _cut(measured: Sequence[Measured], plan: Plan, streams: int) -> Goal:
    cuts = count_of((one.event for one in measured), CUTS)
    long = sum(one.is_long for each in measured for one in each.event)
    one_way = count_of((one.event for one in measured), CUTS - {CUT})
    said = f"{cuts} ({long} longer than every give-up, {one_way} one-way)"
    return Goal("cuts", f"cut links under {streams} streams", said, f">= {plan.cuts}", cuts >= plan.cuts)


def _unharmed(answers: int, problem: str) -> Goal:
    harmed = 1 if problem else 0  # a run ends with the first problem
    what = "streams that differ from their undisturbed reference, or are lost, or have a token twice"
    return Goal("streams", what, f"{harmed} in {answers} whole answers", "0", not harmed)


def _longest(name: str, what: str, waits: Sequence[float], bound_s: float) -> Goal:
    """Return the goal that every wait, not only their median, is within the bound."""
    said = f"longest {max(waits):.2f} s (median {median(waits):.2f}, p95 {p95(waits):.2f})"
    return Goal(name, what, said, f"<= {bound_s:g} s", max(waits) <= bound_s)


def _draft(measured: Sequence[Measured]) -> list[Goal]:
    """Return the goal that the kill of a draft lengthens the longest wait by at most a round and DRAFT_MS.

    The effect is small beside the differences between waits on a busy machine, so the second after each kill
    is compared with the second before it.
    """
    kills = [one for one in measured if one.kind == DRAFT_KILL]
    if not kills:
        return []
    more = median_interval([(one.after_s - one.before_s) * _MS for one in kills])
    a_round = median(one.round_s for one in kills) * _MS
    what = "longest wait of any stream in the second after a draft is killed, less that in the second before"
    return [at_most("draft-killed", what, more, round(a_round + DRAFT_MS, 1), " ms")]


def p95(values: Sequence[float]) -> float:
    """Return the 95th percentile, at most the largest value: few values would be extrapolated."""
    return min(quantiles(values, n=100)[_P95], max(values)) if len(values) > 1 else values[0]

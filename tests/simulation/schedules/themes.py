"""Themes: schedules that combine faults which seldom meet in one that is drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from galley.client.options import Retries
from galley.core.admission.admission import Principal, PrincipalLimits
from tests.simulation.grammars import GRAMMARS
from tests.simulation.schedule import Fault, Schedule, Timing
from tests.simulation.schedules.draw import COPIES, Drawer, faults_of
from tests.simulation.schedules.sessions import (
    by_grammar,
    constrained,
    lengthened,
    plan_session,
    shortened,
    twin,
    without_limits,
)


def _wandering(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which sessions move between targets of two builds."""
    whole = replace(
        drawn,
        builds=("build-1", "build-2"),
        credit=rng.choice([4, 8, 16]),
        pass_s=0.25,
        principals=without_limits(drawn.principals),
        sessions=(lengthened(drawn.sessions[0]),),
    )
    return whole.with_faults(tuple(Drawer(rng, whole).partings()))


def _failing_draft(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which the only draft fails every request for a time, or restarts."""
    whole = replace(
        drawn,
        builds=tuple("build-1" for _ in drawn.builds),
        drafts=1,
        pass_s=0.25,
        principals=without_limits(drawn.principals),
        sessions=(lengthened(drawn.sessions[0]), *drawn.sessions[1:]),
    )
    kind = rng.choice(["draft-fails", "kill"])
    failing = Fault(rng.uniform(0.3, 1.5), kind, ("draft-0",), rng.uniform(1.0, 2.5))
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 0, 1, 2])), failing))


def _crowd(drawn: Schedule, rng: random.Random) -> Schedule:
    principals = without_limits(drawn.principals)
    planned = [plan_session(rng, i, principals) for i in range(8)]
    short = [replace(it, spec=shortened(it.spec), at_s=rng.uniform(0.0, 3.0)) for it in planned]
    whole = replace(
        drawn,
        gateways=1,
        builds=("build-1",) * rng.choice([2, 3]),
        credit=0,
        pass_s=0.05,
        slots=8,
        hedge_quantile=rng.choice([0.3, 0.6]),
        principals=principals,
        sessions=tuple(short),
    )
    slow = Fault(rng.uniform(0.8, 1.6), "slow", ("target-0",), rng.uniform(1.0, 2.0), 20.0)
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 1, 2, 4])), slow))


def _orphans(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which clients leave and their sessions continue without them."""
    planned = [replace(it, spec=replace(it.spec, continue_without_client=True)) for it in drawn.sessions]
    whole = replace(drawn, sessions=tuple(planned))
    leaving = tuple(Fault(it.at_s + rng.uniform(0.1, 0.8), "leave", (it.client,)) for it in planned)
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 0, 1, 3])), *leaving))


def _slow_readers(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule of slow clients. None is `long`: with room for one token, nothing is drafted."""
    short = [
        replace(it, spec=shortened(it.spec), within_s=None, pause_s=rng.choice([0.2, 0.6, 1.2]), long=False)
        for it in drawn.sessions
    ]
    whole = replace(drawn, sessions=tuple(short), client_s=2.0, principals=without_limits(drawn.principals))
    return whole.with_faults(faults_of(whole, rng, rng.choice([0, 0, 1, 2])))


def _taken_over(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which clients leave streams unread and others resume the sessions."""
    whole = replace(drawn, client_s=2.0, principals=without_limits(drawn.principals))
    faults = [
        fault
        for it in drawn.sessions
        for fault in (
            Fault(it.at_s + rng.uniform(0.1, 0.5), "stall", (it.client,), rng.uniform(7.0, 10.0)),
            Fault(it.at_s + rng.uniform(0.5, 2.0), "rival", (it.client,)),
        )
    ]
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 0, 1, 2])), *faults))


def _standing_still(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which clients read nothing for longer than a session lives without renewal."""
    planned = [replace(lengthened(it), long=False) for it in drawn.sessions]
    whole = replace(
        drawn,
        client_s=30.0,
        pass_s=0.05,
        principals=without_limits(drawn.principals),
        sessions=tuple(planned),
    )
    stalls = [Fault(it.at_s + rng.uniform(0.1, 0.5), "stall", (it.client,), 9.0) for it in planned]
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 0, 1])), *stalls))


def _lost(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which the store rolls back to before the start of a session that still streams."""
    whole = replace(drawn, pass_s=0.1, principals=without_limits(drawn.principals))
    chosen = rng.choice(whole.sessions)
    since_s = rng.uniform(0.2, 0.8)
    crash = Fault(chosen.at_s + since_s, "redis-crash", (), rng.uniform(0.1, 0.5), since_s + 0.1)
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 0, 1, 2])), crash))


def _no_target(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which the only target is unreachable for longer than streams wait."""
    away = Fault(rng.uniform(0.3, 1.0), "freeze", ("target-0",), rng.uniform(2.6, 3.4))
    whole = replace(drawn, builds=("build-1",))
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 1, 2])), away))


def _pairs(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which two replicas of one pool are away at once, and perhaps all."""
    whole = replace(drawn, gateways=max(2, drawn.gateways), drafts=2)
    if len(whole.builds) < 2:
        whole = replace(whole, builds=whole.builds * 2)
    pool = rng.choice([("gateway", whole.gateways), ("target", len(whole.builds)), ("draft", 2)])
    away = [
        Fault(at_s, rng.choice(["kill", "freeze"]), (f"{pool[0]}-{i}",), rng.uniform(0.3, 3.0))
        for at_s in (rng.uniform(0.3, 1.5), rng.uniform(1.5, 2.5))
        for i in rng.sample(range(pool[1]), 2)
    ]
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 1, 2])), *away))


def _aborted(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which the store's clock is set right after aborts, and sessions expire."""
    planned = [replace(lengthened(it), long=False) for it in drawn.sessions]
    whole = replace(drawn, principals=without_limits(drawn.principals), sessions=tuple(planned))
    faults: list[Fault] = []
    for it in planned:
        at_s = it.at_s + rng.uniform(0.5, 1.5)
        faults += [
            Fault(at_s - 0.4, "elsewhere", (it.client,)),
            Fault(at_s, "abort", (it.client,)),
            Fault(at_s + rng.uniform(0.01, 0.1), "step", ("redis",), amount=150.0),
        ]
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 0, 1])), *faults))


def _aborted_late(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which aborts reach the store after their gateway has given up."""
    whole = replace(drawn, principals=without_limits(drawn.principals), timing=Timing(store_s=0.5))
    faults: list[Fault] = []
    for it in whole.sessions:
        at_s = it.at_s + rng.uniform(0.3, 0.6)
        cut_s = at_s + rng.uniform(0.003, 0.015)
        faults += [
            Fault(at_s, "abort", (it.client,)),
            Fault(cut_s, "deaf", ("gateway-0", "redis"), rng.uniform(1.1, 1.4)),
        ]
    return whole.with_faults(tuple(faults))


def _twins(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which both principals send the same requests."""
    planned = [it for it in drawn.sessions if not it.key]
    twins = [twin(it, rng) for it in planned]
    principals = without_limits(drawn.principals)
    whole = replace(drawn, principals=principals, sessions=(*planned, *twins), slots=8)
    return whole.with_faults(faults_of(whole, rng, rng.choice([0, 1, 2])))


def _rewritten(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which another build computes again what the store has lost."""
    whole = replace(
        drawn,
        gateways=2,
        builds=("build-1", "build-2"),
        replicas=0,
        copies=0,
        pass_s=0.1,
        timing=Timing(),
        principals=without_limits(drawn.principals),
        sessions=(replace(lengthened(drawn.sessions[0]), long=False, checks_seen=True),),
    )
    at_s = whole.sessions[0].at_s + rng.uniform(0.8, 1.5)
    gone = [Fault(at_s, "kill", (name,), 6.0) for name in ("gateway-0", rng.choice(["target-0", "target-1"]))]
    crash = Fault(at_s + 0.01, "redis-crash", (), 0.1, rng.uniform(0.2, 0.6))
    return whole.with_faults((*gone, crash))


def _breaking(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which streams break again and again, with tokens in between."""
    retries = Retries(patience_s=rng.uniform(1.0, 2.0), longest_pause_s=0.1)
    planned = replace(lengthened(drawn.sessions[0]), long=False, retries=retries)
    principals = without_limits(drawn.principals)
    whole = replace(drawn, pass_s=0.25, slots=8, principals=principals, sessions=(planned,))
    return whole.with_faults(
        tuple(
            Fault(at_s + rng.uniform(0.0, 0.2), "reset", (f"gateway-{gateway}", planned.client))
            for at_s in (1.5, 3.0, 4.5, 6.0)
            for gateway in range(whole.gateways)
        )
    )


def _damaged(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which logs are damaged while they are written, and read again elsewhere."""
    whole = replace(drawn, principals=without_limits(drawn.principals))
    faults = [
        Fault(it.at_s + rng.uniform(0.2, 1.0), kind, where, amount=rng.random())
        for it in whole.sessions
        for kind, where in (
            ("damage", (it.client, rng.choice(["torn", "flipped"]))),
            (rng.choice(["elsewhere", "rival"]), (it.client,)),
        )
    ]
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 1, 2])), *faults))


def _leaving(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which a gateway drains, with time to hand over what it streams."""
    planned = [replace(lengthened(it), long=False) for it in drawn.sessions]
    whole = replace(
        drawn,
        gateways=2,
        credit=rng.choice([0, 4]),
        pass_s=0.05,
        timing=Timing(drain_s=2.0),
        principals=without_limits(drawn.principals),
        sessions=tuple(planned),
    )
    return whole.with_faults((Fault(rng.uniform(0.5, 1.5), "drain", ("gateway-0",)),))


def _failing_over(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which a replica of the store is behind when one of them becomes the server."""
    whole = replace(drawn, replicas=2, copies=rng.choice([0, 1, 2, 2]), pass_s=0.05)
    at_s = whole.sessions[0].at_s + rng.uniform(0.1, 0.6)
    behind = Fault(at_s, "cut", ("redis", rng.choice(COPIES)), rng.uniform(0.3, 1.5))
    then = Fault(
        at_s + rng.uniform(0.1, 1.0), "failover", ("redis",), rng.uniform(0.1, 1.0), rng.choice([0, 1])
    )
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 1, 2])), behind, then))


def _refused_resumes(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which others send Resume calls of a running session that must be refused."""
    running = replace(lengthened(drawn.sessions[0]), long=False)
    principals = without_limits(drawn.principals)
    whole = replace(drawn, pass_s=0.25, principals=principals, sessions=(running,))
    return whole.with_faults(
        tuple(
            Fault(running.at_s + rng.uniform(0.3, 2.0), "wrong-resume", (running.client,), amount=index)
            for index in (0, 90, 10**6)
        )
    )


def _metered(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which one principal breaks and resumes streams at all gateways beyond its rate."""
    limits = PrincipalLimits(tokens_per_s=rng.choice([2.0, 10.0]), burst_tokens=40)
    principals = tuple(Principal(it.name, limits) for it in drawn.principals)
    planned = [plan_session(rng, i, principals[:1]) for i in range(6)]
    sessions = tuple(
        replace(it, spec=shortened(it.spec), at_s=rng.uniform(0.0, 2.0), returns=5, return_s=0.5)
        for it in planned
    )
    whole = replace(drawn, gateways=3, slots=8, principals=principals, sessions=sessions)
    breaks = [
        Fault(it.at_s + rng.uniform(0.1, 0.6), "reset", (f"gateway-{gateway}", it.client))
        for it in sessions
        for gateway in range(3)
    ]
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 0, 1])), *breaks))


def _outlived(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which a session expires while its first owner is cut off and its second dead."""
    planned = replace(lengthened(drawn.sessions[0]), long=False)
    planned = replace(planned, spec=replace(planned.spec, continue_without_client=True))
    whole = replace(
        drawn,
        gateways=2,
        pass_s=0.05,
        timing=Timing(store_s=4.0, ttl_s=3.0, pings_s=3.0),
        principals=without_limits(drawn.principals),
        sessions=(planned,),
    )
    at_s = planned.at_s + rng.uniform(0.3, 0.6)
    return whole.with_faults(
        (
            Fault(at_s, "cut", ("gateway-0", "redis"), rng.uniform(3.4, 3.9)),
            Fault(at_s + 0.02, "elsewhere", (planned.client,)),
            Fault(at_s + rng.uniform(0.2, 0.4), "kill", ("gateway-1",), 6.0),
        )
    )


def _few_places(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which more clients come at once than a gateway has places for."""
    principals = without_limits(drawn.principals)
    planned = [replace(plan_session(rng, i, principals), at_s=rng.uniform(0.0, 0.3)) for i in range(6)]
    whole = replace(drawn, gateways=1, slots=2, principals=principals, sessions=tuple(planned))
    return whole.with_faults(faults_of(whole, rng, rng.choice([0, 1, 2])))


def _replayed(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which long answers are replayed at once."""
    planned = [replace(lengthened(it), long=False) for it in drawn.sessions]
    principals = without_limits(drawn.principals)
    whole = replace(drawn, slots=8, principals=principals, sessions=tuple(planned))
    at_s = rng.uniform(3.0, 5.0)
    rivals = [Fault(at_s, "rival", (it.client,)) for it in planned]
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 0, 1])), *rivals))


def _constrained(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which sessions share a grammar and move between targets that are killed."""
    principals, grammar = without_limits(drawn.principals), rng.choice(GRAMMARS)
    planned = [plan_session(rng, i, principals) for i in range(4)]
    sessions = tuple(
        by_grammar(
            replace(it, within_s=None, pause_s=0.0, checks_seen=False, spec=constrained(it.spec)), grammar
        )
        for it in planned
    )
    whole = replace(
        drawn,
        builds=("build-1",) * 2,
        drafts=max(1, drawn.drafts),
        credit=rng.choice([0, 4, 16]),
        pass_s=0.1,
        slots=8,
        principals=principals,
        sessions=sessions,
    )
    kills = [
        Fault(rng.uniform(0.6, 2.5), "kill", (rng.choice(["target-0", "target-1"]),), rng.uniform(0.3, 1.5))
        for _ in range(2)
    ]
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 0, 1])), *kills))


THEMES: dict[str, Callable[[Schedule, random.Random], Schedule]] = {
    "wandering": _wandering,
    "failing draft": _failing_draft,
    "crowd": _crowd,
    "orphans": _orphans,
    "slow readers": _slow_readers,
    "taken over": _taken_over,
    "standing still": _standing_still,
    "no target": _no_target,
    "lost": _lost,
    "refused resumes": _refused_resumes,
    "pairs": _pairs,
    "aborted": _aborted,
    "failing over": _failing_over,
    "damaged": _damaged,
    "leaving": _leaving,
    "aborted late": _aborted_late,
    "twins": _twins,
    "rewritten": _rewritten,
    "breaking": _breaking,
    "metered": _metered,
    "few places": _few_places,
    "replayed": _replayed,
    "outlived": _outlived,
    "constrained": _constrained,
}

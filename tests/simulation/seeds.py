"""The schedule of a seed. Themes combine faults that seldom meet in a schedule drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from galley.core.answer.answer import SessionSpec
from tests.simulation.drawing import Drawer, faults_of, lengthened, plain, plan_session, without_limits
from tests.simulation.schedule import Fault, Schedule

_THEMED = 0.2
"""Share of the schedules that have one."""


def schedule_of(seed: int, theme: str = "") -> Schedule:
    """The schedule of a seed, of a theme where one is named."""
    rng = random.Random(seed)
    drawn = rng.choice(tuple(_THEMES)) if rng.random() < _THEMED else ""
    schedule = plain(seed, rng)
    make = _THEMES.get(theme or drawn)
    return schedule if make is None else make(schedule, rng)


def _wandering(drawn: Schedule, rng: random.Random) -> Schedule:
    """Sessions move between targets of two builds."""
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
    """The only draft is there, and fails whatever it is asked."""
    whole = replace(
        drawn,
        builds=tuple("build-1" for _ in drawn.builds),
        drafts=1,
        pass_s=0.25,
        principals=without_limits(drawn.principals),
        sessions=(lengthened(drawn.sessions[0]), *drawn.sessions[1:]),
    )
    failing = Fault(rng.uniform(0.3, 1.5), "draft-fails", ("draft-0",), rng.uniform(1.0, 2.5))
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 0, 1, 2])), failing))


def _crowd(drawn: Schedule, rng: random.Random) -> Schedule:
    principals = without_limits(drawn.principals)
    planned = [plan_session(rng, i, principals) for i in range(8)]
    short = [replace(it, spec=_short(it.spec), at_s=rng.uniform(0.0, 3.0)) for it in planned]
    whole = replace(
        drawn,
        gateways=1,
        builds=("build-1",) * rng.choice([2, 3]),
        credit=0,
        pass_s=0.05,
        places=8,
        hedge_quantile=rng.choice([0.3, 0.6]),
        principals=principals,
        sessions=tuple(short),
    )
    slow = Fault(rng.uniform(0.8, 1.6), "slow", ("target-0",), rng.uniform(1.0, 2.0), 20.0)
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 1, 2, 4])), slow))


def _short(spec: SessionSpec) -> SessionSpec:
    prompt = spec.prompt[:6]
    return replace(spec, prompt=prompt, max_position=len(prompt) + 20, min_tokens=4)


def _orphans(drawn: Schedule, rng: random.Random) -> Schedule:
    """Clients go, and their sessions are to go on without them."""
    planned = [replace(it, spec=replace(it.spec, continue_without_client=True)) for it in drawn.sessions]
    whole = replace(drawn, sessions=tuple(planned))
    leaving = tuple(Fault(it.at_s + rng.uniform(0.1, 0.8), "leave", (it.client,)) for it in planned)
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 0, 1, 3])), *leaving))


def _slow_readers(drawn: Schedule, rng: random.Random) -> Schedule:
    """Clients that read in time, though barely.

    None is `long` any more: where there is room for one token a round, nothing is drafted.
    """
    short = [
        replace(it, spec=_short(it.spec), within_s=None, pause_s=rng.choice([0.2, 0.6, 1.2]), long=False)
        for it in drawn.sessions
    ]
    whole = replace(drawn, sessions=tuple(short), client_s=2.0, principals=without_limits(drawn.principals))
    return whole.with_faults(faults_of(whole, rng, rng.choice([0, 0, 1, 2])))


def _taken_over(drawn: Schedule, rng: random.Random) -> Schedule:
    """Clients leave their streams unread, and others take their sessions from them."""
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
    """Clients take nothing for longer than a session lives that nobody renews."""
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
    """The store comes back as it was before a session began that still streams."""
    whole = replace(drawn, pass_s=0.1, principals=without_limits(drawn.principals))
    chosen = rng.choice(whole.sessions)
    since_s = rng.uniform(0.2, 0.8)
    crash = Fault(chosen.at_s + since_s, "redis-crash", (), rng.uniform(0.1, 0.5), since_s + 0.1)
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 0, 1, 2])), crash))


def _no_target(drawn: Schedule, rng: random.Random) -> Schedule:
    """The only target is away for longer than streams wait."""
    away = Fault(rng.uniform(0.3, 1.0), "freeze", ("target-0",), rng.uniform(2.6, 3.4))
    whole = replace(drawn, builds=("build-1",))
    return whole.with_faults((*faults_of(whole, rng, rng.choice([0, 1, 2])), away))


_THEMES: dict[str, Callable[[Schedule, random.Random], Schedule]] = {
    "wandering": _wandering,
    "failing draft": _failing_draft,
    "crowd": _crowd,
    "orphans": _orphans,
    "slow readers": _slow_readers,
    "taken over": _taken_over,
    "standing still": _standing_still,
    "no target": _no_target,
    "lost": _lost,
}

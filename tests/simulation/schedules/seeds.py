"""The schedule of a seed."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

from tests.simulation.grammars import GRAMMARS
from tests.simulation.schedule import PlannedSession, Schedule, Timing
from tests.simulation.schedules.audits import AUDITS, with_audits
from tests.simulation.schedules.cuts import with_long_cuts
from tests.simulation.schedules.deletes import DELETES, with_deletes
from tests.simulation.schedules.draw import faults_of
from tests.simulation.schedules.limits import with_limits
from tests.simulation.schedules.sessions import (
    TWIN,
    by_grammar,
    draw_principals,
    lengthened,
    may_have_grammar,
    plan_session,
    twin,
    without_limits,
)
from tests.simulation.schedules.themes import THEMES
from tests.simulation.schedules.versions import VERSIONS, with_versions
from tests.simulation.truth import true_output

_TWINS = 0.15
"""Share of the schedules in which both principals send one request."""
_BY_HTTP = 0.15
"""Share of the sessions by HTTP."""
_AS_RESPONSE = 0.4
"""Share of those that use the Responses API."""
_BY_GRAMMAR = 0.25
"""Share of the sessions that may have a grammar and have one."""
_PREDICTED = 0.15
"""Share of the sessions whose callers predict the answer, all but one token of it."""
_THEMED = 0.2
"""Share of the schedules with a theme."""


def schedule_of(seed: int, theme: str = "", *, is_early: bool = False) -> Schedule:
    """Return the schedule of a seed. An early draw has short cuts, deletes no session, and
    changes no constant of the product.
    """
    rng = random.Random(seed)
    drawn = rng.choice(tuple(THEMES)) if rng.random() < _THEMED else ""
    schedule = _plain(seed, rng)
    make = THEMES.get(theme or drawn)
    if make is not None:
        schedule = make(schedule, rng)
    elif not is_early:
        schedule = with_long_cuts(schedule)
    whole = _bearable(schedule)
    whole = with_versions(whole, always=theme == VERSIONS)
    whole = with_audits(whole, always=theme == AUDITS)
    if not is_early:
        whole = with_limits(with_deletes(whole, always=theme == DELETES))
    return _with_protocols(_with_predictions(_with_grammars(whole)))


def _with_grammars(schedule: Schedule) -> Schedule:
    """Give a part of the sessions a grammar, twins the same; draws of their own leave all else as it was."""
    return schedule.with_sessions(
        tuple(_with_grammar(it, schedule.seed) if may_have_grammar(it) else it for it in schedule.sessions)
    )


def _with_grammar(planned: PlannedSession, seed: int) -> PlannedSession:
    rng = random.Random(f"syntax {seed} {planned.name.removesuffix(TWIN)}")
    return by_grammar(planned, rng.choice(GRAMMARS)) if rng.random() < _BY_GRAMMAR else planned


def _with_predictions(schedule: Schedule) -> Schedule:
    return schedule.with_sessions(tuple(_with_prediction(it, schedule.seed) for it in schedule.sessions))


def _with_prediction(planned: PlannedSession, seed: int) -> PlannedSession:
    rng = random.Random(f"known {seed} {planned.name.removesuffix(TWIN)}")
    if planned.long or rng.random() >= _PREDICTED:
        return planned  # long ones must ask drafts, which nobody asks while a prediction goes on
    answer = true_output(planned.spec, "build-1")
    missing = rng.randrange(len(answer))
    return replace(planned, spec=replace(planned.spec, prediction=answer[:missing] + answer[missing + 1 :]))


def _with_protocols(schedule: Schedule) -> Schedule:
    """Let a part of the clients use HTTP; draws of their own leave all else of a seed as it was."""
    doors, forms = random.Random(f"door {schedule.seed}"), random.Random(f"form {schedule.seed}")
    sessions = [
        replace(
            it,
            by_http=it.checks_seen and doors.random() < _BY_HTTP,
            as_response=forms.random() < _AS_RESPONSE and not it.is_form,
        )
        for it in schedule.sessions
    ]
    return schedule.with_sessions(tuple(sessions))


def _bearable(schedule: Schedule) -> Schedule:
    """Return the schedule with time for a verdict: it may wait for a pass, and takes one itself."""
    least_s, timing = 4 * schedule.pass_s, schedule.timing
    verify_s, target_s = max(timing.verify_s, least_s), max(timing.target_s, least_s)
    return replace(schedule, timing=replace(timing, verify_s=verify_s, target_s=target_s))


def _plain(seed: int, rng: random.Random) -> Schedule:
    principals = draw_principals(rng)
    planned = [plan_session(rng, i, principals) for i in range(rng.choice([1, 1, 2, 2, 3, 4]))]
    targets, drafts = rng.choice([1, 2, 2, 3]), rng.choice([0, 1, 1, 2])
    long = drafts > 0 and rng.random() < 0.15
    if long:
        planned[0], principals = lengthened(planned[0]), without_limits(principals)
    if rng.random() < _TWINS:
        planned.append(twin(planned[0], rng))
    timing, copies = _timing(rng), rng.choice([None, None, 0, 1, 2])
    mixed = targets > 1 and not long and rng.random() < 0.25
    whole = Schedule(
        seed=seed,
        gateways=rng.choice([1, 2, 2, 2, 3]),
        builds=tuple(f"build-{1 + mixed * (i % 2)}" for i in range(targets)),
        drafts=drafts,
        credit=rng.choice([0, 4, 8, 16]),
        window=rng.choice([3, 8, 8, 32]),
        pass_s=0.25 if long else 0.05,
        slots=rng.choice([2, 3, 8]),
        client_s=rng.choice([2.0, 30.0]),
        slow_factor=rng.choice([2.0, 8.0]),
        hedge_quantile=rng.choice([0.0, 0.5, 0.9]),
        looks_up=rng.random() < 0.7,
        replicas=2 * (copies is not None),
        copies=copies or 0,
        timing=timing,
        principals=principals,
        sessions=tuple(planned),
        faults=(),
    )
    return whole.with_faults(faults_of(whole, rng, rng.choice([1, 2, 3, 4, 6, 8])))


def _timing(rng: random.Random) -> Timing:
    """Return the time limits that others are multiples of, or each shrunk or grown at random."""
    if rng.random() < 0.5:
        return Timing()
    values = {
        name: value * rng.choice([0.25, 0.5, 1.0, 1.0, 2.0]) for name, value in asdict(Timing()).items()
    }
    return Timing(**{**values, "ttl_s": max(3.0, values["ttl_s"])})

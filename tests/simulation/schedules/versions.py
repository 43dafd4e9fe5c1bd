"""Draw versions of the drafts, and what happens to them."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.schedule import Fault, Schedule, Timing, VersionPlan
from tests.simulation.schedules.sessions import lengthened, without_limits

VERSIONS = "versions"
"""The theme in which every schedule has versions. A part of all others has them as well."""
SHARE = 0.5

_VERSIONED = 0.15
"""Share of the schedules with drafts that have versions."""
_CALM = 0.3
"""Share of the schedules of the theme in which nothing fails."""
_AWAY = 0.15
"""Share of those in which no draft has the version on trial."""
_OLD = "old"


def with_versions(schedule: Schedule, *, always: bool = False) -> Schedule:
    """Give a part of the schedules versions; draws of their own leave all else of a seed as it was."""
    rng = random.Random(f"draft versions {schedule.seed}")
    if not always and (rng.random() >= _VERSIONED or not schedule.drafts):
        return schedule
    # The name decides which sessions it is given, so that each seed gives it others.
    new = f"new-{schedule.seed}"
    labels = (_OLD, new, rng.choice([_OLD, new, ""]))[: rng.choice([2, 2, 3])]
    whole = replace(schedule, drafts=len(labels))
    drawn = rng.random() if always else 1.0
    if drawn < _AWAY:
        return _without_canary(whole, new)
    if drawn < _AWAY + _CALM:
        trial = Fault(rng.choice([0.0, 0.8]), "try", (new,), amount=SHARE)
        steady = [replace(it, within_s=None, pause_s=0.0, breaks_off=False) for it in whole.sessions]
        calm = replace(whole, faults=(), timing=Timing(), looks_up=False, client_s=30.0)
        return replace(calm, sessions=tuple(steady), versions=VersionPlan(labels, (trial,)))
    changes = [Fault(rng.choice([0.0, 0.0, rng.uniform(0.0, 0.3)]), "try", (new,), amount=SHARE)]
    changes += [_change(rng, whole, labels) for _ in range(rng.choice([0, 1, 2, 4]))]
    return replace(whole, versions=VersionPlan(labels, tuple(sorted(changes, key=lambda it: it.at_s))))


def _without_canary(schedule: Schedule, new: str) -> Schedule:
    """Return a schedule in which half of the sessions are given to a version that no draft has."""
    sessions = (lengthened(schedule.sessions[0]), *schedule.sessions[1:])
    principals = without_limits(schedule.principals)
    plan = VersionPlan((_OLD,) * schedule.drafts, (Fault(0.0, "try", (new,), amount=SHARE),))
    return replace(schedule, pass_s=0.25, principals=principals, sessions=sessions, versions=plan)


def _change(rng: random.Random, schedule: Schedule, labels: tuple[str, ...]) -> Fault:
    at_s = rng.uniform(0.3, 2.5)
    draft, version = f"draft-{rng.randrange(len(labels))}", rng.choice([*labels[:2], "other"])
    kind = rng.choice(["try", "promote", "drain-version", "judge", "judge", "swap", "lie", "twice", "stray"])
    match kind:
        case "try":
            return Fault(at_s, kind, (version,), amount=SHARE)
        case "judge":
            return Fault(at_s, kind, (), amount=rng.choice([0.1, 0.9]))
        case "swap":
            return Fault(at_s, kind, (draft, version), amount=float(rng.random() < 0.4))
        case "lie" | "twice":
            return Fault(at_s, kind, (draft, version), rng.uniform(0.3, 2.0))
        case "stray":
            gateway = f"gateway-{rng.randrange(schedule.gateways)}"
            return Fault(at_s, kind, (gateway, version), rng.uniform(0.2, 1.0))
    return Fault(at_s, kind, (version,))

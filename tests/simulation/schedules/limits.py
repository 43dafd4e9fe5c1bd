"""Draw the time limits that the product fixes as constants, each shrunk or grown for one schedule.

Relations that the product or the rules rely on, and that every draw keeps:

- `LAST_CALL_S` of the session log is added to the time at which a claim is late, by gateways and by the rule;
- the first pause between attempts is at most the longest, in the session log and in the breaker;
- a session lives for at least three renewals (`RENEWALS`), and a finished one at least as long;
- calls within `_LEEWAY_MS` of each other may replace one another, by the rule as well;
- gateways know a change of versions after `READ_S`, which the rule waits for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from galley.client import streams as client_streams
from galley.core.admission import budget
from galley.core.routing import breaker, lateness
from services.gateway.audit import auditor, verification
from services.gateway.replicas import clients, drafts, membership, targets
from services.gateway.session import budgets, runner, streams
from services.gateway.store import session_log
from services.gateway.versions import keeper
from services.target import servicer
from tests.simulation import schedule as simulated
from tests.simulation.schedule import Schedule

_FACTORS = (0.25, 0.5, 1.0, 2.0)
_UNCHANGED = 0.5
"""Share of the schedules with the product's own limits."""

_PLACES: Mapping[str, tuple[object, ...]] = {
    "POLL_S": (membership,),
    "LEASE_GRACE_S": (membership,),
    "MEET_TIMEOUT_S": (membership, clients),
    "probe_timeout_s": (membership.ReplicaPool, drafts.DraftPool),
    "_FIRST_PAUSE_S": (targets,),
    "_LEEWAY_MS": (streams,),
    "_OWNER_PAUSE_MS": (streams,),
    "_SEND_GRACE_S": (runner,),
    "LAST_CALL_S": (session_log,),
    "FIRST_PAUSE_S": (session_log,),
    "LONGEST_PAUSE_S": (session_log, budgets),
    "FIRST_PAUSE_NS": (breaker,),
    "LONGEST_PAUSE_NS": (breaker,),
    "LEAST_NS": (lateness,),
    "IDLE_NS": (budget, budgets),
    "_KNOWN_NS": (budget,),
    "READ_S": (keeper,),
    "_END_WAIT_S": (client_streams,),
    "_QUIET_S": (servicer,),
    "_MEET_S": (verification,),
    "_LOOK_S": (verification, auditor),
    "_LONGEST_REST_S": (auditor,),
    "_RETRY_S": (auditor,),
    "_TURN_NS": (auditor,),
    "FINISHED_TTL_S": (simulated,),
    "MAX_DRAFT_COOLDOWN_S": (simulated,),
    "START_S": (simulated,),
    "RENEWALS": (simulated,),
    "_MOST_NS": (auditor,),
    "_ABSENT_NS": (auditor,),
}
"""The modules and classes that hold each limit; `simulated` holds settings, which the simulation chooses."""
_OTHER_FACTORS: Mapping[str, tuple[float, ...]] = {
    "_LEEWAY_MS": (0.5, 1.0, 2.0, 4.0),
    "_OWNER_PAUSE_MS": (0.5, 1.0, 1.0, 2.0),
    "RENEWALS": (1.0, 2.0),
}
_DELAY_RECOVERY = (
    "POLL_S",
    "MEET_TIMEOUT_S",
    "probe_timeout_s",
    "_OWNER_PAUSE_MS",
    "LAST_CALL_S",
    "LONGEST_PAUSE_S",
    "LEAST_NS",
    "MAX_DRAFT_COOLDOWN_S",
)
LIMITS: Mapping[str, float] = {name: getattr(places[0], name) for name, places in _PLACES.items()}
"""The limits as the product has them."""
_PARTS_OF_A_SECOND = {"ns": 10**9, "ms": 10**3}


def with_limits(schedule: Schedule) -> Schedule:
    """Change the limits of half of the schedules; a draw of its own leaves all else of a seed as it was."""
    rng = random.Random(f"limits {schedule.seed}")
    if rng.random() < _UNCHANGED:
        return schedule
    drawn = {name: rng.choice(_OTHER_FACTORS.get(name, _FACTORS)) for name in LIMITS}
    return replace(schedule, limits=tuple((name, factor) for name, factor in drawn.items() if factor != 1.0))


def grown_s(schedule: Schedule) -> float:
    """Return the time by which grown limits may prolong what a fault has left."""
    return sum(
        max(0.0, factor - 1.0) * LIMITS[name] / _PARTS_OF_A_SECOND.get(name.rpartition("_")[2].lower(), 1)
        for name, factor in schedule.limits
        if name in _DELAY_RECOVERY
    )


@contextmanager
def limited(schedule: Schedule) -> Iterator[None]:
    """Multiply the limits of the product by the factors of a schedule."""
    before = [(it, name, getattr(it, name)) for name, _ in schedule.limits for it in _PLACES[name]]
    factors = dict(schedule.limits)
    try:
        for it, name, value in before:
            setattr(it, name, type(value)(value * factors[name]))
        yield
    finally:
        for it, name, value in before:
            setattr(it, name, value)

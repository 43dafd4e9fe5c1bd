"""The schedule of a seed. Themes combine faults that seldom meet in a schedule drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, replace

from galley.client.options import Retries
from galley.core.admission.admission import Principal, PrincipalLimits
from galley.core.answer.answer import SessionSpec
from galley.core.sampling_params import SamplingParams
from services.gateway.request.validate import session_id_for
from tests.simulation.schedule import ID_SECRET, MOST_K, Fault, PlannedSession, Schedule, Timing
from tests.simulation.truth import STOP, VOCAB

_FAULTS_END_S = 2.5
"""All faults begin before this time; they last a few seconds at most."""
_AROUND = frozenset({"cut", "deaf", "freeze", "lossy", "stall"})
"""Faults whose length is often that of a time limit."""
_LONGEST_S = 10.0
_THEMED = 0.2
"""Share of the schedules with a theme."""


def schedule_of(seed: int, theme: str = "") -> Schedule:
    rng = random.Random(seed)
    drawn = rng.choice(tuple(_THEMES)) if rng.random() < _THEMED else ""
    schedule = _plain(seed, rng)
    make = _THEMES.get(theme or drawn)
    return schedule if make is None else make(schedule, rng)


def _plain(seed: int, rng: random.Random) -> Schedule:
    principals = _principals(rng)
    planned = [_plan_session(rng, i, principals) for i in range(rng.choice([1, 1, 2, 2, 3, 4]))]
    targets, drafts = rng.choice([1, 2, 2, 3]), rng.choice([0, 1, 1, 2])
    long = drafts > 0 and rng.random() < 0.15
    if long:
        planned[0], principals = _lengthened(planned[0]), _without_limits(principals)
    timing = _timing(rng)
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
        timing=timing,
        principals=principals,
        sessions=tuple(planned),
        faults=(),
    )
    return whole.with_faults(_faults_of(whole, rng, rng.choice([1, 2, 3, 4, 6, 8])))


def _timing(rng: random.Random) -> Timing:
    """Return the time limits that others are multiples of, or each shrunk or grown at random."""
    if rng.random() < 0.5:
        return Timing()
    values = {
        name: value * rng.choice([0.25, 0.5, 1.0, 1.0, 2.0]) for name, value in asdict(Timing()).items()
    }
    return Timing(**{**values, "ttl_s": max(3.0, values["ttl_s"])})


def _retries(rng: random.Random) -> Retries:
    if rng.random() < 0.5:
        return Retries()
    return Retries(
        rng.choice([0.0, 0.3, 2.0, 8.0, 30.0]),
        rng.choice([0.3, 2.0, 5.0]),
        rng.choice([0.01, 0.05, 0.5]),
        rng.choice([0.1, 0.5, 2.0]),
    )


def _faults_of(schedule: Schedule, rng: random.Random, count: int) -> tuple[Fault, ...]:
    drawer = _Drawer(rng, schedule)
    return tuple(sorted((drawer.fault() for _ in range(count)), key=_time_of))


def _time_of(fault: Fault) -> float:
    return fault.at_s


def _principals(rng: random.Random) -> tuple[Principal, ...]:
    return tuple(Principal(name, _limits(rng)) for name in rng.choice([("me",), ("me", "you")]))


def _limits(rng: random.Random) -> PrincipalLimits:
    if rng.random() < 0.6:
        return PrincipalLimits()
    return PrincipalLimits(rng.choice([None, 1, 2]), rng.choice([None, 60.0]), 120)


def _without_limits(principals: tuple[Principal, ...]) -> tuple[Principal, ...]:
    return tuple(Principal(principal.name) for principal in principals)


def _plan_session(rng: random.Random, number: int, principals: tuple[Principal, ...]) -> PlannedSession:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 10, 30])))
    stops = frozenset({STOP}) if rng.random() < 0.7 else frozenset()
    name, principal = f"session-{number}", rng.choice(principals).name
    auto = rng.random() < 0.5
    spec = SessionSpec(
        session_id=session_id_for(principal, name, ID_SECRET),
        prompt=prompt,
        sampling=SamplingParams(seed=rng.randrange(2**32)),
        max_position=len(prompt) + rng.choice([1, 8, 24, 40, 60]),
        vocab_size=VOCAB,
        stop_token_ids=stops,
        min_tokens=rng.choice([0, 0, 1]),
        logprobs=rng.choice([None, None, 0]),
        k=MOST_K if auto else rng.choice([0, 2, 4, 8]),
        auto=auto,
        continue_without_client=rng.random() < 0.25,
    )
    within_s = rng.uniform(1.2, 4.0) if rng.random() < 0.15 else None
    pause_s = rng.choice([0.0, 0.0, 0.0, 0.0, 0.05, 0.4])
    at_s, checks_seen, breaks_off = rng.uniform(0.0, 1.0), rng.random() < 0.8, rng.random() < 0.2
    planned = PlannedSession(name, principal, spec, at_s, checks_seen, within_s, pause_s, breaks_off)
    returns, return_s = rng.choice([0, 0, 1, 5]), rng.choice([0.05, 0.5, 2.0])
    return replace(planned, retries=_retries(rng), returns=returns, return_s=return_s)


def _lengthened(planned: PlannedSession) -> PlannedSession:
    """Return a session that outlasts all faults and always requests drafts."""
    spec = planned.spec
    length = len(spec.prompt) + 100
    spec = replace(spec, max_position=length, stop_token_ids=frozenset(), k=4, auto=False)
    return replace(planned, spec=spec, within_s=None, pause_s=0.0, long=True, retries=Retries(), returns=5)


class _Drawer:
    def __init__(self, rng: random.Random, schedule: Schedule) -> None:
        self._rng = rng
        gateways = [f"gateway-{i}" for i in range(schedule.gateways)]
        self._targets = [f"target-{i}" for i in range(len(schedule.builds))]
        drafts = [f"draft-{i}" for i in range(schedule.drafts)]
        clients = [planned.client for planned in schedule.sessions]
        replicas = self._targets + drafts
        nodes = [*gateways, *replicas, "redis"]
        timing, patience = schedule.timing, {it.retries.patience_s for it in schedule.sessions}
        self._give_ups = [*astuple(timing), *sorted(patience), schedule.client_s, timing.renew_s]
        self._killed = gateways + replicas + self._targets
        # (weight, kind, the groups that its subjects come from, its longest time in seconds, amounts)
        self._kinds: list[tuple[int, str, Sequence[Sequence[str]], float, Sequence[float]]] = [
            (6, "kill", (), 0.0, ()),
            (4, "redis-crash", (), 0.0, ()),
            (4, "cut", (gateways, [*replicas, "redis", "redis", *clients]), 6.0, ()),
            (3, "deaf", (gateways, [*replicas, "redis", "redis", *clients]), 6.0, ()),
            (3, "freeze", (nodes,), 3.0, ()),
            (2, "slow", ([*nodes, *clients],), 3.0, (3.0, 20.0, 100.0)),
            (2, "reset", (gateways, [*replicas, *clients]), 0.0, ()),
            (2, "jump", (gateways,), 20.0, ()),
            (3, "lossy", (), 2.0, (0.1, 0.4)),
            (2, "repeat", (), 3.0, (0.2, 1.0)),
            (1, "engine-fails", (self._targets,), 1.0, ()),
            (1, "draft-fails", (drafts or ["none"],), 2.0, ()),
            (2, "drain", (gateways + replicas,), 0.0, ()),
            (4, "stall", (clients,), 14.0, ()),
            (3, "elsewhere", (clients,), 0.0, ()),
            (1, "abort", (clients,), 0.0, ()),
            (2, "rival", (clients,), 0.0, ()),
            (1, "leave", (clients,), 0.0, ()),
            (2, "wrong-resume", (clients,), 0.0, (0, 10**6)),
        ]

    def fault(self) -> Fault:
        rng = self._rng
        [(_, kind, groups, longest_s, amounts)] = rng.choices(self._kinds, [kind[0] for kind in self._kinds])
        at_s = rng.uniform(0.0, _FAULTS_END_S)
        if kind == "kill":
            node = rng.choice(self._killed)
            return Fault(at_s, kind, (node,), self._span(1.5), amount=float(rng.random() < 0.2))
        if kind == "redis-crash":
            lost_s = rng.choice([0.0, 0.0, 0.02, 0.2, 1.0, 9.0])
            return Fault(at_s, kind, (), self._span(3.0), lost_s)
        where = tuple(rng.choice(group) for group in groups)
        if kind == "deaf" and rng.random() < 0.5:
            where = where[::-1]
        for_s = self._span(longest_s) if longest_s else 0.0
        if kind in _AROUND and rng.random() < 0.5:
            for_s = self._around()
        if kind == "jump":
            return Fault(at_s, kind, where, amount=for_s)
        if kind in {"lossy", "repeat"}:
            where = ("redis",)
        return Fault(at_s, kind, where, for_s, rng.choice(amounts) if amounts else 0.0)

    def partings(self) -> list[Fault]:
        """Return faults that freeze the targets in turn: sessions move away and come back to their caches."""
        return [
            Fault(
                1.0 + 4.0 * turn + self._rng.uniform(0.0, 0.4),
                "freeze",
                (self._targets[turn % 2],),
                self._rng.uniform(2.9, 3.5),
            )
            for turn in range(4)
        ]

    def _around(self) -> float:
        """Return a time just before or after some part gives up, or after two of them in turn."""
        rng = self._rng
        limits_s: float = sum(rng.choice(self._give_ups) for _ in range(rng.choice([1, 1, 2])))
        return min(_LONGEST_S, max(0.02, limits_s * rng.uniform(0.95, 1.1) + rng.uniform(-0.1, 0.2)))

    def _span(self, longest_s: float) -> float:
        return self._rng.choice([0.03, 0.3, 1.0]) * longest_s * self._rng.uniform(0.5, 1.0)


def _wandering(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which sessions move between targets of two builds."""
    whole = replace(
        drawn,
        builds=("build-1", "build-2"),
        credit=rng.choice([4, 8, 16]),
        pass_s=0.25,
        principals=_without_limits(drawn.principals),
        sessions=(_lengthened(drawn.sessions[0]),),
    )
    return whole.with_faults(tuple(_Drawer(rng, whole).partings()))


def _failing_draft(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which the only draft fails every request for a time."""
    whole = replace(
        drawn,
        builds=tuple("build-1" for _ in drawn.builds),
        drafts=1,
        pass_s=0.25,
        principals=_without_limits(drawn.principals),
        sessions=(_lengthened(drawn.sessions[0]), *drawn.sessions[1:]),
    )
    failing = Fault(rng.uniform(0.3, 1.5), "draft-fails", ("draft-0",), rng.uniform(1.0, 2.5))
    return whole.with_faults((*_faults_of(whole, rng, rng.choice([0, 0, 1, 2])), failing))


def _crowd(drawn: Schedule, rng: random.Random) -> Schedule:
    principals = _without_limits(drawn.principals)
    planned = [_plan_session(rng, i, principals) for i in range(8)]
    short = [replace(it, spec=_short(it.spec), at_s=rng.uniform(0.0, 3.0)) for it in planned]
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
    return whole.with_faults((*_faults_of(whole, rng, rng.choice([0, 1, 2, 4])), slow))


def _short(spec: SessionSpec) -> SessionSpec:
    prompt = spec.prompt[:6]
    return replace(spec, prompt=prompt, max_position=len(prompt) + 20, min_tokens=4)


def _orphans(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which clients leave and their sessions continue without them."""
    planned = [replace(it, spec=replace(it.spec, continue_without_client=True)) for it in drawn.sessions]
    whole = replace(drawn, sessions=tuple(planned))
    leaving = tuple(Fault(it.at_s + rng.uniform(0.1, 0.8), "leave", (it.client,)) for it in planned)
    return whole.with_faults((*_faults_of(whole, rng, rng.choice([0, 0, 1, 3])), *leaving))


def _slow_readers(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule of slow clients. None is `long`: with room for one token, nothing is drafted."""
    short = [
        replace(it, spec=_short(it.spec), within_s=None, pause_s=rng.choice([0.2, 0.6, 1.2]), long=False)
        for it in drawn.sessions
    ]
    whole = replace(drawn, sessions=tuple(short), client_s=2.0, principals=_without_limits(drawn.principals))
    return whole.with_faults(_faults_of(whole, rng, rng.choice([0, 0, 1, 2])))


def _taken_over(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which clients leave streams unread and others resume the sessions."""
    whole = replace(drawn, client_s=2.0, principals=_without_limits(drawn.principals))
    faults = [
        fault
        for it in drawn.sessions
        for fault in (
            Fault(it.at_s + rng.uniform(0.1, 0.5), "stall", (it.client,), rng.uniform(7.0, 10.0)),
            Fault(it.at_s + rng.uniform(0.5, 2.0), "rival", (it.client,)),
        )
    ]
    return whole.with_faults((*_faults_of(whole, rng, rng.choice([0, 0, 1, 2])), *faults))


def _standing_still(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which clients read nothing for longer than a session lives without renewal."""
    planned = [replace(_lengthened(it), long=False) for it in drawn.sessions]
    whole = replace(
        drawn,
        client_s=30.0,
        pass_s=0.05,
        principals=_without_limits(drawn.principals),
        sessions=tuple(planned),
    )
    stalls = [Fault(it.at_s + rng.uniform(0.1, 0.5), "stall", (it.client,), 9.0) for it in planned]
    return whole.with_faults((*_faults_of(whole, rng, rng.choice([0, 0, 1])), *stalls))


def _lost(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which the store rolls back to before the start of a session that still streams."""
    whole = replace(drawn, pass_s=0.1, principals=_without_limits(drawn.principals))
    chosen = rng.choice(whole.sessions)
    since_s = rng.uniform(0.2, 0.8)
    crash = Fault(chosen.at_s + since_s, "redis-crash", (), rng.uniform(0.1, 0.5), since_s + 0.1)
    return whole.with_faults((*_faults_of(whole, rng, rng.choice([0, 0, 1, 2])), crash))


def _no_target(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which the only target is unreachable for longer than streams wait."""
    away = Fault(rng.uniform(0.3, 1.0), "freeze", ("target-0",), rng.uniform(2.6, 3.4))
    whole = replace(drawn, builds=("build-1",))
    return whole.with_faults((*_faults_of(whole, rng, rng.choice([0, 1, 2])), away))


def _refused_resumes(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which others send Resume calls of a running session that must be refused."""
    running = replace(_lengthened(drawn.sessions[0]), long=False)
    principals = _without_limits(drawn.principals)
    whole = replace(drawn, pass_s=0.25, principals=principals, sessions=(running,))
    return whole.with_faults(
        tuple(
            Fault(running.at_s + rng.uniform(0.3, 2.0), "wrong-resume", (running.client,), amount=index)
            for index in (0, 90, 10**6)
        )
    )


def _metered(drawn: Schedule, rng: random.Random) -> Schedule:
    """Return a schedule in which one principal asks several gateways for more tokens than its budget has."""
    principals = (Principal("me", PrincipalLimits(tokens_per_s=rng.choice([8.0, 20.0]), burst_tokens=40)),)
    planned = [replace(_plan_session(rng, i, principals), within_s=None) for i in range(6)]
    whole = replace(
        drawn, gateways=rng.choice([2, 3]), pass_s=0.05, principals=principals, sessions=tuple(planned)
    )
    leaving = [Fault(it.at_s + rng.uniform(0.1, 1.5), "elsewhere", (it.client,)) for it in planned]
    return whole.with_faults((*_faults_of(whole, rng, rng.choice([0, 1, 2, 4])), *leaving))


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
    "refused resumes": _refused_resumes,
    "metered": _metered,
}

"""Draw the parts of a schedule from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from galley.core.admission.principal import Principal, PrincipalLimits
from galley.core.answer.answer import SessionSpec
from galley.core.sampling_params import SamplingParams
from services.gateway.request.session_id import session_id_for
from tests.simulation.schedule import ID_SECRET, MOST_K, Fault, PlannedSession, Schedule
from tests.simulation.truth import STOP, VOCAB

FAULTS_END_S = 2.5
"""All faults begin before; they last some seconds more at most."""


def plain(seed: int, rng: random.Random) -> Schedule:
    principals = _principals(rng)
    planned = [plan_session(rng, i, principals) for i in range(rng.choice([1, 1, 2, 2, 3, 4]))]
    targets, drafts = rng.choice([1, 2, 2, 3]), rng.choice([0, 1, 1, 2])
    long = drafts > 0 and rng.random() < 0.15
    if long:
        planned[0], principals = lengthened(planned[0]), without_limits(principals)
    mixed = targets > 1 and not long and rng.random() < 0.25
    whole = Schedule(
        seed=seed,
        gateways=rng.choice([1, 2, 2, 2, 3]),
        builds=tuple(f"build-{1 + mixed * (i % 2)}" for i in range(targets)),
        drafts=drafts,
        credit=rng.choice([0, 4, 8, 16]),
        window=rng.choice([3, 8, 8, 32]),
        pass_s=0.25 if long else 0.05,
        places=rng.choice([2, 3, 8]),
        client_s=rng.choice([2.0, 30.0]),
        slow_factor=rng.choice([2.0, 8.0]),
        hedge_quantile=rng.choice([0.0, 0.5, 0.9]),
        looks_up=rng.random() < 0.7,
        principals=principals,
        sessions=tuple(planned),
        faults=(),
    )
    return whole.with_faults(faults_of(whole, rng, rng.choice([1, 2, 3, 4, 6, 8])))


def faults_of(schedule: Schedule, rng: random.Random, count: int) -> tuple[Fault, ...]:
    drawer = Drawer(rng, schedule)
    return tuple(sorted((drawer.fault() for _ in range(count)), key=_time_of))


def _time_of(fault: Fault) -> float:
    return fault.at_s


def _principals(rng: random.Random) -> tuple[Principal, ...]:
    return tuple(Principal(name, _limits(rng)) for name in rng.choice([("me",), ("me", "you")]))


def _limits(rng: random.Random) -> PrincipalLimits:
    if rng.random() < 0.6:
        return PrincipalLimits()
    return PrincipalLimits(rng.choice([None, 1, 2]), rng.choice([None, 60.0]), 120)


def without_limits(principals: tuple[Principal, ...]) -> tuple[Principal, ...]:
    return tuple(Principal(principal.name) for principal in principals)


def plan_session(rng: random.Random, number: int, principals: tuple[Principal, ...]) -> PlannedSession:
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
    return PlannedSession(name, principal, spec, at_s, checks_seen, within_s, pause_s, breaks_off)


def lengthened(planned: PlannedSession) -> PlannedSession:
    """A session that outlasts all faults, and wants drafts whatever they cost."""
    spec = planned.spec
    length = len(spec.prompt) + 100
    spec = replace(spec, max_position=length, stop_token_ids=frozenset(), k=4, auto=False)
    return replace(planned, spec=spec, within_s=None, pause_s=0.0, long=True)


class Drawer:
    """Draws faults for a world of a given size."""

    def __init__(self, rng: random.Random, schedule: Schedule) -> None:
        self._rng = rng
        self._gateways = [f"gateway-{i}" for i in range(schedule.gateways)]
        self._targets = [f"target-{i}" for i in range(len(schedule.builds))]
        self._drafts = [f"draft-{i}" for i in range(schedule.drafts)]
        self._clients = [planned.client for planned in schedule.sessions]
        self._replicas = self._targets + self._drafts
        self._kinds: list[tuple[int, Callable[[float], Fault]]] = [
            (6, self._kill),
            (4, self._redis_crash),
            (4, self._cut),
            (3, self._freeze),
            (2, self._slow),
            (2, self._reset),
            (2, self._jump),
            (3, self._lossy),
            (2, self._repeat),
            (1, self._engine_fails),
            (1, self._draft_fails),
            (2, self._drain),
            (4, self._stall),
            (3, self._elsewhere),
            (1, self._abort),
            (2, self._rival),
            (1, self._leave),
        ]

    def fault(self) -> Fault:
        weights = [weight for weight, _ in self._kinds]
        [(_, draw)] = self._rng.choices(self._kinds, weights)
        return draw(self._rng.uniform(0.0, FAULTS_END_S))

    def partings(self) -> list[Fault]:
        """Sessions have to leave first the one target, then the other, whose caches outlive it."""
        return [
            Fault(
                1.0 + 4.0 * turn + self._rng.uniform(0.0, 0.4),
                "freeze",
                (self._targets[turn % 2],),
                self._rng.uniform(2.9, 3.5),
            )
            for turn in range(4)
        ]

    def _span(self, longest_s: float) -> float:
        return self._rng.choice([0.03, 0.3, 1.0]) * longest_s * self._rng.uniform(0.5, 1.0)

    def _kill(self, at_s: float) -> Fault:
        node = self._rng.choice(self._gateways + self._replicas + self._targets)
        return Fault(at_s, "kill", (node,), self._span(1.5), amount=float(self._rng.random() < 0.2))

    def _redis_crash(self, at_s: float) -> Fault:
        lost_s = self._rng.choice([0.0, 0.0, 0.02, 0.2, 1.0, 9.0])
        return Fault(at_s, "redis-crash", (), self._span(3.0), lost_s)

    def _cut(self, at_s: float) -> Fault:
        near = self._rng.choice(self._gateways)
        far = self._rng.choice([*self._replicas, "redis", "redis", *self._clients])
        return Fault(at_s, "cut", (near, far), self._span(3.0))

    def _freeze(self, at_s: float) -> Fault:
        node = self._rng.choice([*self._gateways, *self._replicas, "redis"])
        return Fault(at_s, "freeze", (node,), self._span(3.0))

    def _slow(self, at_s: float) -> Fault:
        node = self._rng.choice([*self._gateways, *self._replicas, "redis", *self._clients])
        return Fault(at_s, "slow", (node,), self._span(3.0), self._rng.choice([3.0, 20.0, 100.0]))

    def _reset(self, at_s: float) -> Fault:
        near = self._rng.choice(self._gateways)
        return Fault(at_s, "reset", (near, self._rng.choice([*self._replicas, *self._clients])))

    def _jump(self, at_s: float) -> Fault:
        return Fault(at_s, "jump", (self._rng.choice(self._gateways),), amount=self._span(20.0))

    def _lossy(self, at_s: float) -> Fault:
        return Fault(at_s, "lossy", ("redis",), self._span(2.0), self._rng.choice([0.1, 0.4]))

    def _repeat(self, at_s: float) -> Fault:
        return Fault(at_s, "repeat", ("redis",), self._span(3.0), self._rng.choice([0.2, 1.0]))

    def _engine_fails(self, at_s: float) -> Fault:
        return Fault(at_s, "engine-fails", (self._rng.choice(self._targets),), self._span(1.0))

    def _draft_fails(self, at_s: float) -> Fault:
        return Fault(at_s, "draft-fails", (self._rng.choice(self._drafts or ["none"]),), self._span(2.0))

    def _drain(self, at_s: float) -> Fault:
        return Fault(at_s, "drain", (self._rng.choice(self._gateways + self._replicas),))

    def _stall(self, at_s: float) -> Fault:
        return Fault(at_s, "stall", (self._rng.choice(self._clients),), self._span(14.0))

    def _elsewhere(self, at_s: float) -> Fault:
        return Fault(at_s, "elsewhere", (self._rng.choice(self._clients),))

    def _abort(self, at_s: float) -> Fault:
        return Fault(at_s, "abort", (self._rng.choice(self._clients),))

    def _rival(self, at_s: float) -> Fault:
        return Fault(at_s, "rival", (self._rng.choice(self._clients),))

    def _leave(self, at_s: float) -> Fault:
        return Fault(at_s, "leave", (self._rng.choice(self._clients),))

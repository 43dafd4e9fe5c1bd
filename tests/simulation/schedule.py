"""What happens in one schedule, all drawn up front from its seed: the world, the sessions, the faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.client.options import GenerateOptions, Speculation
from services.core.answer import SessionSpec
from services.core.params import SamplingParams
from services.core.principal import Principal, PrincipalLimits
from services.gateway.principals import session_id_for
from tests.simulation.truth import STOP, VOCAB

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS_END_S = 2.5
"""All faults begin before; they last some seconds more at most."""
ID_SECRET = b"of all gateways"
MOST_K = 8
"""Of the target, which the gateways keep to."""
_THEMES = ("wandering", "failing draft", "crowd", "orphans", "slow readers", "taken over")
_THEMED = 0.15
"""Share of schedules that have a theme: what comes together seldom where all is drawn by itself."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`at_s` counts from when all is ready; what `amount` is depends on the kind (see `faults.py`)."""

    at_s: float
    kind: str
    where: tuple[str, ...] = ()
    for_s: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        for_s = f" for {self.for_s:.3f} s" if self.for_s else ""
        amount = f", {self.amount:g}" if self.amount else ""
        return f"at {self.at_s:.3f} s: {self.kind} {' '.join(self.where)}{for_s}{amount}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One session: its request, when it is asked for, and how its client is.

    `within_s` is the deadline of each of its streams, `pause_s` the time that it takes to read an event. Who
    `breaks_off` loses its connection with the last event. One that is `long` outlasts the faults and wants
    drafts.
    """

    name: str
    principal: str
    spec: SessionSpec
    at_s: float
    checks_seen: bool = True
    within_s: float | None = None
    pause_s: float = 0.0
    breaks_off: bool = False
    long: bool = False

    @property
    def client(self) -> str:
        """The name of who asks."""
        return self.name.replace("session", "client")

    def options(self) -> GenerateOptions:
        """The request, but for its prompt."""
        spec = self.spec
        return {
            "max_tokens": spec.max_position - len(spec.prompt),
            "min_tokens": spec.min_tokens,
            "ignore_eos": STOP not in spec.stop_token_ids,
            "seed": spec.sampling.seed,
            "logprobs": spec.logprobs,
            "speculation": Speculation() if spec.auto else Speculation(off=spec.k == 0, k=spec.k),
            "idempotency_key": self.name,
            "continue_without_client": spec.continue_without_client,
            "timeout_s": self.within_s,
        }

    def __str__(self) -> str:
        spec = self.spec
        length = spec.max_position - len(spec.prompt)
        alone = ", goes on alone" if spec.continue_without_client else ""
        what = f"{self.name} ({spec.session_id}) of {len(spec.prompt)} + {length} tokens, k {spec.k}{alone}"
        return f"at {self.at_s:.3f} s: {self.principal} wants {what}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule. `places` are each gateway's; the rest of its settings are as the gateway's are named."""

    seed: int
    gateways: int
    builds: tuple[str, ...]
    drafts: int
    credit: int
    window: int
    pass_s: float
    places: int
    client_s: float
    slow_factor: float
    hedge_quantile: float
    looks_up: bool
    principals: tuple[Principal, ...]
    sessions: tuple[Wanted, ...]
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        head = (
            f"seed {self.seed}: {self.gateways} gateways of {self.places} places, "
            f"targets {', '.join(self.builds)}, {self.drafts} drafts, credit {self.credit}, "
            f"window {self.window}, passes of {self.pass_s} s, client_s {self.client_s}, "
            f"slow_factor {self.slow_factor}, hedge_quantile {self.hedge_quantile}, looks_up {self.looks_up}"
        )
        return "\n".join([head, *(f"  {what}" for what in (*self.principals, *self.sessions, *self.faults))])

    @property
    def healed_s(self) -> float:
        """When the last fault is over."""
        return max((fault.at_s + fault.for_s for fault in self.faults), default=0.0)

    def with_faults(self, faults: tuple[Fault, ...]) -> Schedule:
        """The same with other faults."""
        return replace(self, faults=faults)

    def with_sessions(self, sessions: tuple[Wanted, ...]) -> Schedule:
        """The same with other sessions."""
        return replace(self, sessions=sessions)


def schedule_of(seed: int, theme: str = "") -> Schedule:
    """The schedule of a seed, of a theme where one is named."""
    rng = random.Random(seed)
    drawn = rng.choice(_THEMES) if rng.random() < _THEMED else ""
    theme = theme or drawn
    plain = _plain(seed, rng)
    match theme:
        case "wandering":
            return _wandering(plain, rng)
        case "failing draft":
            return _failing_draft(plain, rng)
        case "crowd":
            return _crowd(plain, rng)
        case "orphans":
            return _orphans(plain, rng)
        case "slow readers":
            return _slow_readers(plain, rng)
        case "taken over":
            return _taken_over(plain, rng)
        case _:
            return plain


def _plain(seed: int, rng: random.Random) -> Schedule:
    """Everything by itself."""
    principals = _principals(rng)
    wanted = [_wanted(rng, i, principals) for i in range(rng.choice([1, 1, 2, 2, 3, 4]))]
    targets, drafts = rng.choice([1, 2, 2, 3]), rng.choice([0, 1, 1, 2])
    long = drafts > 0 and rng.random() < 0.15
    if long:
        wanted[0], principals = _long(wanted[0]), _without_limits(principals)
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
        sessions=tuple(wanted),
        faults=(),
    )
    return whole.with_faults(_faults(whole, rng, rng.choice([1, 2, 3, 4, 6, 8])))


def _faults(schedule: Schedule, rng: random.Random, count: int) -> tuple[Fault, ...]:
    drawer = _Drawer(rng, schedule)
    return tuple(sorted((drawer.fault() for _ in range(count)), key=_time_of))


def _time_of(fault: Fault) -> float:
    return fault.at_s


# ------------------------------------------------------------------------------------- themes --


def _wandering(plain: Schedule, rng: random.Random) -> Schedule:
    """Sessions move between targets of two builds."""
    whole = replace(
        plain,
        builds=("build-1", "build-2"),
        credit=rng.choice([4, 8, 16]),
        pass_s=0.25,
        principals=_without_limits(plain.principals),
        sessions=(_long(plain.sessions[0]),),
    )
    return whole.with_faults(tuple(_Drawer(rng, whole).partings()))


def _failing_draft(plain: Schedule, rng: random.Random) -> Schedule:
    """The only draft is there, and fails whatever it is asked."""
    whole = replace(
        plain,
        builds=tuple("build-1" for _ in plain.builds),
        drafts=1,
        pass_s=0.25,
        principals=_without_limits(plain.principals),
        sessions=(_long(plain.sessions[0]), *plain.sessions[1:]),
    )
    failing = Fault(rng.uniform(0.3, 1.5), "draft-fails", ("draft-0",), rng.uniform(1.0, 2.5))
    return whole.with_faults((*_faults(whole, rng, rng.choice([0, 0, 1, 2])), failing))


def _crowd(plain: Schedule, rng: random.Random) -> Schedule:
    """Many short sessions at one gateway, with more than one target of one build: where hedging pays."""
    principals = _without_limits(plain.principals)
    wanted = [_wanted(rng, i, principals) for i in range(8)]
    short = [replace(it, spec=_short(it.spec), at_s=rng.uniform(0.0, 3.0)) for it in wanted]
    whole = replace(
        plain,
        gateways=1,
        builds=("build-1",) * rng.choice([2, 3]),
        credit=0,
        pass_s=0.05,
        places=8,
        hedge_quantile=rng.choice([0.3, 0.6]),
        principals=principals,
        sessions=tuple(short),
    )
    slow = Fault(rng.uniform(0.8, 2.0), "slow", ("target-0",), rng.uniform(0.2, 1.5), 20.0)
    return whole.with_faults((*_faults(whole, rng, rng.choice([0, 1, 2, 4])), slow))


def _short(spec: SessionSpec) -> SessionSpec:
    prompt = spec.prompt[:6]
    return replace(spec, prompt=prompt, max_position=len(prompt) + 20, min_tokens=4)


def _orphans(plain: Schedule, rng: random.Random) -> Schedule:
    """Clients go, and their sessions are to go on without them."""
    wanted = [replace(it, spec=replace(it.spec, continue_without_client=True)) for it in plain.sessions]
    whole = replace(plain, sessions=tuple(wanted))
    leaving = tuple(Fault(it.at_s + rng.uniform(0.1, 0.8), "leave", (it.client,)) for it in wanted)
    return whole.with_faults((*_faults(whole, rng, rng.choice([0, 0, 1, 3])), *leaving))


def _slow_readers(plain: Schedule, rng: random.Random) -> Schedule:
    """Clients that read in time, though barely."""
    short = [
        replace(it, spec=_short(it.spec), within_s=None, pause_s=rng.choice([0.2, 0.6, 1.2]))
        for it in plain.sessions
    ]
    whole = replace(plain, sessions=tuple(short), client_s=2.0, principals=_without_limits(plain.principals))
    return whole.with_faults(_faults(whole, rng, rng.choice([0, 0, 1, 2])))


def _taken_over(plain: Schedule, rng: random.Random) -> Schedule:
    """Clients leave their streams unread, and others take their sessions from them."""
    whole = replace(plain, client_s=2.0, principals=_without_limits(plain.principals))
    faults = [
        fault
        for it in plain.sessions
        for fault in (
            Fault(it.at_s + rng.uniform(0.1, 0.5), "stall", (it.client,), rng.uniform(7.0, 10.0)),
            Fault(it.at_s + rng.uniform(0.5, 2.0), "rival", (it.client,)),
        )
    ]
    return whole.with_faults((*_faults(whole, rng, rng.choice([0, 0, 1, 2])), *faults))


# ----------------------------------------------------------------------- clients and sessions --


def _principals(rng: random.Random) -> tuple[Principal, ...]:
    """Some with limits of their own."""
    return tuple(Principal(name, _limits(rng)) for name in rng.choice([("me",), ("me", "you")]))


def _limits(rng: random.Random) -> PrincipalLimits:
    if rng.random() < 0.6:
        return PrincipalLimits()
    return PrincipalLimits(rng.choice([None, 1, 2]), rng.choice([None, 60.0]), 120)


def _without_limits(principals: tuple[Principal, ...]) -> tuple[Principal, ...]:
    return tuple(Principal(principal.name) for principal in principals)


def _wanted(rng: random.Random, number: int, principals: tuple[Principal, ...]) -> Wanted:
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
    return Wanted(name, principal, spec, at_s, checks_seen, within_s, pause_s, breaks_off)


def _long(wanted: Wanted) -> Wanted:
    """A session that outlasts all faults, and wants drafts whatever they cost."""
    spec = wanted.spec
    length = len(spec.prompt) + 100
    spec = replace(spec, max_position=length, stop_token_ids=frozenset(), k=4, auto=False)
    return replace(wanted, spec=spec, within_s=None, pause_s=0.0, long=True)


class _Drawer:
    """Draws faults for a world of so many nodes."""

    def __init__(self, rng: random.Random, schedule: Schedule) -> None:
        self._rng = rng
        self._gateways = [f"gateway-{i}" for i in range(schedule.gateways)]
        self._targets = [f"target-{i}" for i in range(len(schedule.builds))]
        self._drafts = [f"draft-{i}" for i in range(schedule.drafts)]
        self._clients = [wanted.client for wanted in schedule.sessions]
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
        """Any."""
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

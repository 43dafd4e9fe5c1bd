"""What happens in one schedule, all drawn up front from its seed: the world, the sessions, the faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.core.answer import SessionSpec
from services.core.params import SamplingParams
from tests.simulation.truth import STOP, VOCAB

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS_END_S = 2.5
"""All faults begin before; they last some seconds more at most."""


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

    `within_s` is the deadline of each of its calls. One that is `long` outlasts the faults and wants drafts.
    """

    spec: SessionSpec
    at_s: float
    checks_seen: bool = True
    within_s: float | None = None
    long: bool = False

    @property
    def client(self) -> str:
        """The name of who asks."""
        return self.spec.session_id.replace("session", "client")

    def __str__(self) -> str:
        spec = self.spec
        length = spec.max_position - len(spec.prompt)
        return f"at {self.at_s:.3f} s: {spec.session_id} of {len(spec.prompt)} + {length} tokens, k {spec.k}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule."""

    seed: int
    gateways: int
    builds: tuple[str, ...]
    drafts: int
    credit: int
    window: int
    pass_s: float
    sessions: tuple[Wanted, ...]
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        head = (
            f"seed {self.seed}: {self.gateways} gateways, targets {', '.join(self.builds)}, "
            f"{self.drafts} drafts, credit {self.credit}, window {self.window}, passes of {self.pass_s} s"
        )
        return "\n".join([head, *(f"  {what}" for what in (*self.sessions, *self.faults))])

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


def schedule_of(seed: int, *, wandering: bool = False) -> Schedule:
    """The schedule of a seed; `wandering`: one in which sessions move between targets of two builds."""
    rng = random.Random(seed)
    wandering = rng.random() < 0.03 or wandering
    gateways = rng.choice([1, 2, 2, 2, 3])
    targets = 2 if wandering else rng.choice([1, 2, 2, 3])
    drafts = rng.choice([0, 1, 1, 2])
    wanted = [_wanted(rng, i) for i in range(rng.choice([1, 1, 2, 2, 3, 4]))]
    long = not wandering and drafts > 0 and rng.random() < 0.15
    if long:
        wanted[0] = _long(wanted[0])
    mixed = wandering or (targets > 1 and not long and rng.random() < 0.25)
    builds = tuple(f"build-{1 + mixed * (i % 2)}" for i in range(targets))
    drawer = _Drawer(rng, gateways, targets, drafts, len(wanted))
    faults = [drawer.fault() for _ in range(rng.choice([1, 2, 3, 4, 6, 8]))]
    if wandering:
        wanted, faults = [_long(wanted[0])], drawer.partings()
    credit = rng.choice([4, 8, 16] if wandering else [0, 4, 8, 16])
    window = rng.choice([3, 8, 8, 32])
    pass_s = 0.25 if long or wandering else 0.05
    sessions, faults = tuple(wanted), sorted(faults, key=_time_of)
    return Schedule(seed, gateways, builds, drafts, credit, window, pass_s, sessions, tuple(faults))


def _time_of(fault: Fault) -> float:
    return fault.at_s


def _wanted(rng: random.Random, number: int) -> Wanted:
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, 10, 30])))
    stops = frozenset({STOP}) if rng.random() < 0.7 else frozenset()
    spec = SessionSpec(
        session_id=f"session-{number}",
        prompt=prompt,
        sampling=SamplingParams(seed=rng.randrange(2**32)),
        max_position=len(prompt) + rng.choice([1, 8, 24, 40, 60]),
        vocab_size=VOCAB,
        stop_token_ids=stops,
        min_tokens=rng.choice([0, 0, 4]),
        logprobs=rng.choice([None, None, 0]),
        k=rng.choice([0, 2, 4, 8]),
        auto=rng.random() < 0.5,
        arrival_ns=1 + number,
    )
    within_s = rng.uniform(1.2, 4.0) if rng.random() < 0.15 else None
    return Wanted(spec, rng.uniform(0.0, 1.0), rng.random() < 0.8, within_s)


def _long(wanted: Wanted) -> Wanted:
    """A session that outlasts all faults, and wants drafts whatever they cost."""
    spec = wanted.spec
    length = len(spec.prompt) + 100
    spec = replace(spec, max_position=length, stop_token_ids=frozenset(), k=4, auto=False)
    return replace(wanted, spec=spec, within_s=None, long=True)


class _Drawer:
    """Draws faults for a world of so many nodes."""

    def __init__(self, rng: random.Random, gateways: int, targets: int, drafts: int, clients: int) -> None:
        self._rng = rng
        self._gateways = [f"gateway-{i}" for i in range(gateways)]
        self._targets = [f"target-{i}" for i in range(targets)]
        self._drafts = [f"draft-{i}" for i in range(drafts)]
        self._clients = [f"client-{i}" for i in range(clients)]
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

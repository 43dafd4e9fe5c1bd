"""Sessions in closed loops whose mix of workloads drifts, each kept with what it takes to ask it again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.living.traffic import Figures, Sample, figures_between, windows_of
from bench.living.workloads import ENGLISH, SPANISH, SQL, Mixture
from galley import GalleyRpcError
from galley.bench.answers import Answer, Rounds
from galley.bench.closed_loop import GatewayLoop
from galley.bench.workloads import Prompt

_LENGTHS = (16, 20, 24)
_SAMPLED_EVERY = 4
_TEMPERATURE = 0.7
_MOST_FAILURES = 50


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the traffic: it ends once this share of the sessions has begun."""

    name: str
    ends: float
    weights: Mapping[str, float]


PHASES = (
    Phase("what the shipped draft knows", 0.15, {ENGLISH: 1.0}),
    Phase("SQL", 0.45, {SQL: 0.9, ENGLISH: 0.1}),
    Phase("Spanish", 0.75, {SPANISH: 0.9, SQL: 0.1}),
    Phase("mixed", 1.0, {ENGLISH: 1.0, SQL: 1.0, SPANISH: 1.0}),
)


def phase_at(share: float) -> Phase:
    """Return the phase in which a session begins before which this share of all has begun."""
    return next((phase for phase in PHASES if share < phase.ends), PHASES[-1])


@dataclass(frozen=True, slots=True)
class Request:
    prompt: Prompt
    temperature: float
    seed: int
    max_tokens: int

    async def send(self, loop: GatewayLoop, arm: str) -> Answer:
        return await loop.answer(
            arm, self.prompt, temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """A session that has ended, with the token ids that its client got."""

    session_id: str
    request: Request
    tokens: tuple[int, ...]


@dataclass(slots=True)
class Sessions:
    """Traffic of `count` sessions, and more while `is_needed`. The lists grow while `run` runs."""

    loop: GatewayLoop
    count: int
    streams: int
    arm: str
    is_needed: bool = False
    finished: list[Finished] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    _mixture: Mixture = field(default_factory=lambda: Mixture(1))
    _sent: int = 0
    _awaited: list[tuple[float, asyncio.Event]] = field(default_factory=list)

    async def run(self) -> None:
        """Send until all sessions are finished. Raise RuntimeError after too many failures."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.streams):
                group.create_task(self._send())

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def share(self) -> float:
        """Return the share of the sessions that have begun."""
        return self._sent / self.count

    async def reach(self, share: float) -> None:
        """Wait until this share of the sessions has begun."""
        event = asyncio.Event()
        self._awaited.append((share, event))
        await event.wait()

    @property
    def phase(self) -> Phase:
        return phase_at(self.share)

    @property
    def workloads(self) -> Sequence[str]:
        return list(dict.fromkeys(name for phase in PHASES for name in phase.weights))

    def between(self, from_s: float, to_s: float) -> Mapping[str, Figures]:
        """Return the figures of the sessions that ended in this time, by workload."""
        return figures_between(self.samples, self.workloads, from_s, to_s)

    def windows(self, length_s: float) -> list[tuple[float, Mapping[str, Figures]]]:
        return windows_of(self.samples, self.workloads, length_s)

    async def _send(self) -> None:
        while self._sent < self.count or self.is_needed:
            request = self._next()
            try:
                answer = await request.send(self.loop, self.arm)
            except GalleyRpcError as error:
                self.failures.append(str(error))
                if len(self.failures) > _MOST_FAILURES:
                    raise RuntimeError(f"{len(self.failures)} sessions failed, the last: {error}") from error
                continue
            self.finished.append(Finished(answer.session_id, request, answer.tokens))
            rounds = answer.rounds or Rounds()
            label = request.prompt.label
            self.samples.append(Sample(self.now_s, label, len(answer.tokens), answer.wall_s, rounds))

    def _next(self) -> Request:
        number, phase = self._sent, self.phase
        self._sent += 1
        for share, event in self._awaited:
            if self.share >= share:
                event.set()
        return Request(
            self._mixture.next(phase.weights),
            temperature=0.0 if number % _SAMPLED_EVERY else _TEMPERATURE,
            seed=number,
            max_tokens=_LENGTHS[number % len(_LENGTHS)],
        )

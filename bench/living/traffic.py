"""Traffic of several workloads in closed loops, until it is stopped, and what its clients see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bench.living.workloads import prompts
from galley.bench.answers import Rounds
from galley.bench.closed_loop import AUTO, GatewayLoop
from galley.bench.workloads import Prompt


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer: when it ended, in seconds since the start, and the gateway's counts of its rounds."""

    at_s: float
    workload: str
    tokens: int
    wall_s: float
    rounds: Rounds


@dataclass(slots=True)
class Traffic:
    """One stream a workload; `samples` grows while `run` runs. Answers are greedy."""

    loop: GatewayLoop
    workloads: Sequence[str]
    seed: int
    max_tokens: int
    arm: str = AUTO
    samples: list[Sample] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Ask until cancelled. The first error ends it."""
        async with asyncio.TaskGroup() as group:
            for workload in self.workloads:
                group.create_task(self._send(prompts(workload, self.seed)))

    async def _send(self, stream: Iterator[Prompt]) -> None:
        for prompt in stream:
            answer = await self.loop.answer(
                self.arm, prompt, temperature=0.0, seed=self.seed, max_tokens=self.max_tokens
            )
            rounds = answer.rounds or Rounds()
            self.samples.append(Sample(self.now_s, prompt.label, len(answer.tokens), answer.wall_s, rounds))

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    def windows(self, length_s: float) -> list[tuple[float, Mapping[str, Figures]]]:
        """Return the figures of each window, with the time of its end."""
        return windows_of(self.samples, self.workloads, length_s)

    def between(self, from_s: float, to_s: float) -> Mapping[str, Figures]:
        """Return the figures of the answers that ended in this time, by workload."""
        return figures_between(self.samples, self.workloads, from_s, to_s)


@dataclass(frozen=True, slots=True)
class Figures:
    """`first` is the share of rounds whose first draft token was accepted, of those that verified any.

    `drafted_share` is the share of output tokens that were accepted draft tokens.
    """

    answers: int
    tokens: int
    first: float
    drafted_share: float
    tokens_per_s: float


def windows_of(
    samples: Sequence[Sample], workloads: Sequence[str], length_s: float
) -> list[tuple[float, Mapping[str, Figures]]]:
    """Return the figures of each whole window, with the time of its end."""
    last_s = max((one.at_s for one in samples), default=0.0)
    ends = [length_s * number for number in range(1, int(last_s // length_s) + 1)]
    return [(end, figures_between(samples, workloads, end - length_s, end)) for end in ends]


def figures_between(
    samples: Sequence[Sample], workloads: Sequence[str], from_s: float, to_s: float
) -> Mapping[str, Figures]:
    """Return the figures of the answers that ended in this time, by workload."""
    recent = [one for one in samples if from_s <= one.at_s < to_s]
    return {name: figures_of([one for one in recent if one.workload == name]) for name in workloads}


def figures_of(samples: Sequence[Sample]) -> Figures:
    tokens = sum(one.tokens for one in samples)
    first = [_first(one.rounds) for one in samples]
    verified = sum(of for _, of in first)
    return Figures(
        answers=len(samples),
        tokens=tokens,
        first=sum(accepted for accepted, _ in first) / verified if verified else 0.0,
        drafted_share=sum(one.rounds.accepted for one in samples) / tokens if tokens else 0.0,
        tokens_per_s=tokens / wall_s if (wall_s := sum(one.wall_s for one in samples)) else 0.0,
    )


def _first(rounds: Rounds) -> tuple[int, int]:
    return next(iter(rounds.accepted_at), 0), next(iter(rounds.verified_at), 0)

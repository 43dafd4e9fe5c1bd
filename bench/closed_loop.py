"""A closed loop: so many streams at once, each asking its next prompt when its answer has ended.

A block is a fixed list of prompts, answered by one arm at one number of streams and one temperature. Speed
is counted tokens (up to an answer's first loop) over the whole block's wall time, so that what is cut
never counts, and prefill, queueing and the block's tail are all in it.

Every prompt of a run begins with a tag of its own, `(pair.streams.arm.temperature.number)`, which stands
in the first block of every cache: no side is flattered by a prefix cache that has seen the 96 prompts
before.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from bench.harness import PROMPT_SETS, Answer, Prompt, load_prompts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

WARM_UP = -1
_LEAST_ANSWERS = 3
_ANSWERS_A_STREAM = 2


@dataclass(frozen=True, slots=True)
class Load:
    """One block's work; `arm` answers it."""

    pair: int
    arm: str
    streams: int
    temperature: float
    prompts: tuple[Prompt, ...]
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class LoopBlock:
    """What came of a load; `cpu_s` is of all processes of the arm's side over the whole block."""

    load: Load
    answers: tuple[Answer, ...]
    wall_s: float
    cpu_s: float

    @property
    def tokens(self) -> int:
        """Counted ones."""
        return sum(answer.counted for answer in self.answers)

    @property
    def given(self) -> int:
        """All tokens, those in loops too."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Counted tokens over the block's wall time."""
        return self.tokens / self.wall_s

    @property
    def cpu_per_token(self) -> float:
        """CPU seconds per token; loops cost as much as the rest, so all tokens share them."""
        return self.cpu_s / max(1, self.given)

    @property
    def first_token_s(self) -> list[float]:
        """From each request to its first token."""
        return [answer.at_s[0] for answer in self.answers if answer.at_s]

    @property
    def inter_token_s(self) -> list[float]:
        """From each token to the next of its answer; 0 between tokens that came together."""
        return [
            later - earlier
            for answer in self.answers
            for earlier, later in zip(answer.at_s, answer.at_s[1:], strict=False)
        ]


class LoopSide(Protocol):
    """Answers loads."""

    async def run(self, load: Load) -> LoopBlock:
        """Carry one load out to its end."""
        ...


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Which blocks a run is made of."""

    arms: tuple[str, ...]
    streams: tuple[int, ...]
    temperatures: tuple[float, ...]
    pairs: int
    max_tokens: int
    seed: int


def loads(plan: LoopPlan) -> Iterator[Load]:
    """A warm-up of every arm at the most streams, then the pairs; the order of the arms rotates."""
    prompts = interleaved()
    for arm in plan.arms:
        yield _load(plan, WARM_UP, arm, max(plan.streams), plan.temperatures[-1], prompts)
    for pair in range(plan.pairs):
        shift = pair % len(plan.arms)
        for streams in plan.streams:
            for temperature in plan.temperatures:
                for arm in plan.arms[shift:] + plan.arms[:shift]:
                    yield _load(plan, pair, arm, streams, temperature, prompts)


def interleaved() -> list[Prompt]:
    """All fixed prompts, the sets in turn."""
    sets = [load_prompts(name) for name in PROMPT_SETS]
    return [prompt for group in zip(*sets, strict=True) for prompt in group]


def _load(
    plan: LoopPlan, pair: int, arm: str, streams: int, temperature: float, prompts: Sequence[Prompt]
) -> Load:
    count = streams if pair == WARM_UP else max(_LEAST_ANSWERS, _ANSWERS_A_STREAM * streams)
    # Arms of a pair get the same prompts; the next pair goes on where this one ended.
    first = (pair + 1) * count
    chosen = tuple(
        _tagged(
            prompts[at % len(prompts)],
            f"{pair + 1:02}.{streams:02}.{plan.arms.index(arm)}.{temperature:.1f}.{at % 1000:03}",
        )
        for at in range(first, first + count)
    )
    return Load(pair, arm, streams, temperature, chosen, plan.max_tokens, plan.seed + 1000 * (pair + 1))


def _tagged(prompt: Prompt, tag: str) -> Prompt:
    return Prompt(prompt.id, f"({tag}) {prompt.text}")


async def run_loads(
    plan: LoopPlan,
    sides: dict[str, LoopSide],
    tell: Callable[[str], None],
    after_block: Callable[[LoopBlock], None] = lambda _: None,
) -> list[LoopBlock]:
    """Run all blocks of a plan, one at a time; the warm-up is not among those returned."""
    every = list(loads(plan))
    blocks = []
    for at, load in enumerate(every, 1):
        block = await sides[load.arm].run(load)
        name = "warm-up" if load.pair == WARM_UP else f"pair {load.pair + 1}/{plan.pairs}"
        tell(
            f"{at}/{len(every)} {name}: {load.arm}, {load.streams} streams at {load.temperature:g}: "
            f"{block.tokens} tokens, {block.tokens_per_s:.1f}/s"
        )
        if load.pair != WARM_UP:
            blocks.append(block)
            after_block(block)
    return blocks


async def in_streams(load: Load, answer: Callable[[Prompt, int], Awaitable[Answer]]) -> list[Answer]:
    """Ask `answer(prompt, seed)` for every prompt of the load, `load.streams` at a time, in order."""
    waiting = iter(enumerate(load.prompts))
    answers: list[Answer | None] = [None] * len(load.prompts)

    async def stream() -> None:
        for at, prompt in waiting:
            answers[at] = await answer(prompt, load.seed + at)

    async with asyncio.TaskGroup() as group:
        for _ in range(load.streams):
            group.create_task(stream())
    return [given for given in answers if given is not None]


def block_record(block: LoopBlock) -> dict[str, Any]:
    """For the JSON of a run."""
    load = block.load
    return {
        "pair": load.pair,
        "arm": load.arm,
        "streams": load.streams,
        "temperature": load.temperature,
        "answers": len(block.answers),
        "tokens": block.given,
        "counted": block.tokens,
        "wall_s": round(block.wall_s, 4),
        "cpu_s": round(block.cpu_s, 4),
        "prompts": [prompt.id for prompt in load.prompts],
    }

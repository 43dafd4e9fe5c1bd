"""A closed loop: so many streams at once, each asking its next prompt when its answer has ended.

A block is a fixed list of prompts, answered by one arm at one number of streams and one temperature. At one
stream speed is counted tokens (up to an answer's first loop) over the seconds until they had come: neither
a loop's tokens nor its time count. At more streams the wall time is shared, and a loop's part of it cannot be
told: speed is all tokens over the wall time, with queueing in it, and the share of tokens in loops stands
beside it. Where a stream has several prompts, it is measured until the first stream finds none waiting:
after that there are fewer streams than the block is of.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from galley.bench.answers import Answer, Prompt

WARM_UP = -1


@dataclass(frozen=True, slots=True)
class Load:
    """One block's work; `arm` answers it. `workload` is the kind of its prompts, empty for a mixture."""

    pair: int
    arm: str
    streams: int
    temperature: float
    prompts: tuple[Prompt, ...]
    max_tokens: int
    seed: int
    workload: str = ""


@dataclass(frozen=True, slots=True)
class LoopBlock:
    """What came of a load; `cpu_s` is of all processes of the arm's side over the whole block.

    `asked_s` says when each answer was asked for, `busy_s` until when all streams had work, both in seconds
    from the block's begin; without them the whole block is measured.
    """

    load: Load
    answers: tuple[Answer, ...]
    wall_s: float
    cpu_s: float
    asked_s: tuple[float, ...] = ()
    busy_s: float | None = None

    @property
    def tokens(self) -> int:
        """Counted ones."""
        return sum(answer.counted for answer in self.answers)

    @property
    def given(self) -> int:
        """All tokens, those in loops too."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def timed_tokens(self) -> int:
        """The tokens that speed is taken of: at one stream those counted, else all that came in time."""
        if self.load.streams == 1:
            return self.tokens
        if self.busy_s is None:
            return self.given
        asked = zip(self.asked_s, self.answers, strict=True)
        return sum(asked_s + at_s <= self.busy_s for asked_s, answer in asked for at_s in answer.at_s)

    @property
    def timed_s(self) -> float:
        """The seconds that `timed_tokens` took."""
        if self.load.streams == 1:
            return sum(answer.counted_s for answer in self.answers)
        return self.wall_s if self.busy_s is None else self.busy_s

    @property
    def tokens_per_s(self) -> float:
        """The block's speed."""
        return speed_of([self])

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


def speed_of(blocks: Sequence[LoopBlock]) -> float:
    """Tokens per second over several blocks of one number of streams."""
    return sum(block.timed_tokens for block in blocks) / sum(block.timed_s for block in blocks)


class LoopSide(Protocol):
    """Answers loads."""

    async def run(self, load: Load) -> LoopBlock:
        """Carry one load out to its end."""
        ...


async def run_all(
    loads: Sequence[Load],
    sides: Mapping[str, LoopSide],
    tell: Callable[[str], None],
    after_block: Callable[[LoopBlock], None] = lambda _: None,
) -> list[LoopBlock]:
    """Run the loads one at a time, each on its arm's side; the warm-up is not among the blocks returned."""
    blocks = []
    for at, load in enumerate(loads, 1):
        block = await sides[load.arm].run(load)
        name = "warm-up" if load.pair == WARM_UP else f"pair {load.pair + 1}"
        of = f"{load.workload}, " if load.workload else ""
        tell(
            f"{at}/{len(loads)} {name}: {of}{load.arm}, {load.streams} streams at {load.temperature:g}: "
            f"{block.timed_tokens} tokens, {block.tokens_per_s:.1f}/s"
        )
        if load.pair != WARM_UP:
            blocks.append(block)
            after_block(block)
    return blocks


def tagged(prompt: Prompt, tag: str) -> Prompt:
    """With `(tag)` before it, in the first block of every cache: none has kept it under another tag."""
    return replace(prompt, text=f"({tag}) {prompt.text}")


@dataclass(frozen=True, slots=True)
class Looped:
    """The answers of a load in its order; `asked_s` and `busy_s` as in LoopBlock, if streams took turns."""

    answers: tuple[Answer, ...]
    asked_s: tuple[float, ...]
    busy_s: float | None


async def in_streams(load: Load, answer: Callable[[Prompt, int], Awaitable[Answer]]) -> Looped:
    """Ask `answer(prompt, seed)` for every prompt of the load, `load.streams` at a time, in order.

    Raises what the first to fail raised; the others are cancelled.
    """
    waiting = iter(enumerate(load.prompts))
    answers: list[Answer | None] = [None] * len(load.prompts)
    asked_s = [0.0] * len(load.prompts)
    idle_s: list[float] = []
    began_s = time.perf_counter()

    async def stream() -> None:
        for at, prompt in waiting:
            asked_s[at] = time.perf_counter() - began_s
            answers[at] = await answer(prompt, load.seed + at)
        idle_s.append(time.perf_counter() - began_s)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(load.streams):
                group.create_task(stream())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    in_turns = len(load.prompts) > load.streams
    given = tuple(given for given in answers if given is not None)
    return Looped(given, tuple(asked_s), idle_s[0] if in_turns else None)

"""Closed loops: concurrent streams, each of which sends its next prompt when its answer has ended.

A block is a fixed list of prompts, answered by one arm at one number of streams and one temperature. At one
stream, speed is the counted tokens (up to an answer's first loop) over the time until they came. At several
streams the loop's share of the time is unknown: speed is all tokens over the wall time, queueing included,
and the share of tokens in loops is reported. If streams have several prompts each, measuring ends when the
first stream finds no prompt left, because fewer streams run after that.

An arm is a way of speculating: `off`, `auto` (the gateway chooses) or `<strategy>-<k>`, such as `ngram-4`.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from galley.bench.answers import Answer, Rounds
from galley.bench.workloads import Prompt
from galley.client.client import AsyncClient
from galley.client.options import Message, Speculation
from galley.common.printable import one_line
from galley.core.session.events import SourceTokens
from galley.pb.galley.v1 import galley_pb2 as pb

WARM_UP = -1
OFF, AUTO = "off", "auto"
_FIXED_ARM = re.compile(r"(?P<strategy>.+)-(?P<k>[0-9]+)(x(?P<width>[0-9]+))?")
# Reading a prompt costs about as much as this number of output tokens.
_PROMPT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one block for `arm`. `workload` is the kind of its prompts, empty for a mixture."""

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
    """The answers to a load, one a turn; `cpu_s` is the CPU time of all processes of its side over the block.

    `requested_s` are the times of the requests, `busy_s` the time until which all streams had work, both in
    seconds since the start of the block; without them the whole block is measured.
    """

    load: Load
    answers: tuple[Answer, ...]
    wall_s: float
    cpu_s: float
    requested_s: tuple[float, ...] = ()
    busy_s: float | None = None

    @property
    def tokens(self) -> int:
        return sum(answer.counted for answer in self.answers)

    @property
    def given(self) -> int:
        """Return the number of all tokens, those in loops included."""
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def timed_tokens(self) -> int:
        """Return how many tokens the speed covers: at one stream the counted ones, else all in `busy_s`."""
        if self.load.streams == 1:
            return self.tokens
        if self.busy_s is None:
            return self.given
        requests = zip(self.requested_s, self.answers, strict=True)
        return sum(start_s + at_s <= self.busy_s for start_s, answer in requests for at_s in answer.at_s)

    @property
    def timed_s(self) -> float:
        if self.load.streams == 1:
            return sum(answer.counted_s for answer in self.answers)
        return self.wall_s if self.busy_s is None else self.busy_s

    @property
    def tokens_per_s(self) -> float:
        return speed_of([self])

    @property
    def whole_tokens_per_s(self) -> float:
        """Return all tokens per second from the first request until the last answer."""
        return self.given / self.wall_s

    @property
    def cpu_per_token(self) -> float:
        """CPU seconds per token, of all tokens: those in loops cost as much as the rest."""
        return self.cpu_s / max(1, self.given)


def speed_of(blocks: Sequence[LoopBlock]) -> float:
    """Return tokens per second over several blocks of one number of streams."""
    return sum(block.timed_tokens for block in blocks) / sum(block.timed_s for block in blocks)


class LoopSide(Protocol):
    async def run(self, load: Load) -> LoopBlock: ...


def work_of(load: Load) -> float:
    """Return about how long a load takes, in any unit: streams share steps, which so become slower."""
    tokens = sum(_PROMPT_TOKENS + (prompt.max_tokens or load.max_tokens) for prompt in load.prompts)
    return tokens / math.sqrt(load.streams)


async def run_all(
    loads: Sequence[Load],
    sides: Mapping[str, LoopSide],
    report: Callable[[str], None],
    after_block: Callable[[LoopBlock], None] = lambda _: None,
    progress: Callable[[float], None] = lambda _: None,
) -> list[LoopBlock]:
    """Run the loads one at a time, each on its arm's side. Return their blocks without the warm-up.

    `progress` gets the share of the work that is done, after each load.
    """
    blocks, whole, done = [], sum(map(work_of, loads)), 0.0
    for at, load in enumerate(loads, 1):
        block = await sides[load.arm].run(load)
        done += work_of(load)
        progress(done / whole)
        name = "warm-up" if load.pair == WARM_UP else f"pair {load.pair + 1}"
        of = f"{one_line(load.workload)}, " if load.workload else ""
        report(
            f"{at}/{len(loads)} {name}: {of}{load.arm}, {load.streams} streams at {load.temperature:g}: "
            f"{block.timed_tokens} tokens, {block.tokens_per_s:.1f}/s"
        )
        if load.pair != WARM_UP:
            blocks.append(block)
            after_block(block)
    return blocks


def tagged(prompt: Prompt, tag: str) -> Prompt:
    """Return the prompt with `(tag)` before it, so that no cache has it from another pair."""
    return replace(prompt, text=f"({tag}) {prompt.text}")


def no_clock() -> float:
    return 0.0


async def run_load(
    load: Load, answer: Callable[[Prompt, int], Awaitable[Answer]], cpu_s: Callable[[], float] = no_clock
) -> LoopBlock:
    """Answer the prompts in order, `load.streams` at a time. The first error cancels the rest.

    A stream asks the later turns of a prompt, each after the answer before, and only then its next prompt.
    """
    waiting = iter(enumerate(load.prompts))
    answers: list[list[Answer]] = [[] for _ in load.prompts]
    requested_s: list[list[float]] = [[] for _ in load.prompts]
    idle_s: list[float] = []
    cpu_before, began_s = cpu_s(), time.perf_counter()

    async def stream() -> None:
        for at, prompt in waiting:
            await asyncio.sleep(max(0.0, began_s + prompt.arrives_s - time.perf_counter()))
            turn: Prompt | None = prompt
            while turn is not None:
                requested_s[at].append(time.perf_counter() - began_s)
                answers[at].append(await answer(turn, load.seed + at))
                turn = turn.next_turn(answers[at][-1].text)
        idle_s.append(time.perf_counter() - began_s)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(load.streams):
                group.create_task(stream())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    wall_s = time.perf_counter() - began_s
    in_turns = len(load.prompts) > load.streams
    busy_s = idle_s[0] if in_turns else None
    given, requested = tuple(chain.from_iterable(answers)), tuple(chain.from_iterable(requested_s))
    return LoopBlock(load, given, wall_s, cpu_s() - cpu_before, requested, busy_s)


def fixed_arm(strategy: str, k: int, width: int = 1) -> str:
    """Return the arm of k draft tokens a round, of which at most `width` are for one position."""
    return f"{strategy}-{k}" if width == 1 else f"{strategy}-{k}x{width}"


def speculation_of(arm: str) -> Speculation:
    """Return the request's speculation for an arm. Raises ValueError if it is no arm."""
    if arm == OFF:
        return Speculation(off=True)
    if arm == AUTO:
        return Speculation()
    match = _FIXED_ARM.fullmatch(arm)
    if match is None:
        raise ValueError(f"arm: must be {OFF}, {AUTO} or <strategy>-<k>[x<width>], got {arm!r}")
    width = int(match["width"]) if match["width"] else None
    return Speculation(k=int(match["k"]), width=width, strategy=match["strategy"])


class GatewayLoop:
    """Closed loops through a gateway, with the speculation of an arm (None: of the load's arm)."""

    def __init__(
        self,
        client: AsyncClient,
        cpu_s: Callable[[], float] = no_clock,
        speculation: str | None = None,
        *,
        no_audit: bool = False,
    ) -> None:
        self._client = client
        self._cpu_s = cpu_s
        self._speculation = speculation
        self._no_audit = no_audit

    async def run(self, load: Load) -> LoopBlock:
        arm = load.arm if self._speculation is None else self._speculation

        async def answer(prompt: Prompt, seed: int) -> Answer:
            return await self.answer(
                arm,
                prompt,
                temperature=load.temperature,
                seed=seed,
                max_tokens=prompt.max_tokens or load.max_tokens,
            )

        return await run_load(load, answer, self._cpu_s)

    async def answer(
        self, arm: str, prompt: Prompt, *, temperature: float, seed: int, max_tokens: int
    ) -> Answer:
        """Return one streamed answer. Raises GalleyRpcError."""
        at_s: list[float] = []
        texts: list[str] = []
        began_s = time.perf_counter()
        stream = self._client.stream(
            [Message(**message) for message in prompt.messages],
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=1.0,  # the whole distribution, also of a model that recommends less
            seed=seed,
            workload=prompt.label,
            schema=prompt.schema,
            prediction=prompt.prediction,
            speculation=speculation_of(arm),
            no_audit=self._no_audit,
        )
        async for event in stream:
            at_s += [time.perf_counter() - began_s] * len(event.chunk.token_ids)
            texts.append(event.chunk.text)
        wall_s = time.perf_counter() - began_s
        if stream.finished is None:
            raise RuntimeError(f"{arm}: {prompt.id} ended without a reason")
        rounds = _rounds(stream.finished.speculation)
        return Answer(tuple(stream.tokens), tuple(at_s), wall_s, rounds, "".join(texts), stream.session_id)


def _rounds(stats: pb.SpeculationStats) -> Rounds:
    return Rounds(
        rounds=stats.rounds,
        proposed=stats.proposed,
        cancelled=stats.cancelled,
        drafted=stats.drafted,
        verified=stats.verified,
        accepted=stats.accepted,
        accepted_at=tuple(stats.accepted_at),
        verified_at=tuple(stats.verified_at),
        accepted_by_rank=tuple(stats.accepted_by_rank),
        verified_by_rank=tuple(stats.verified_by_rank),
        proposals=stats.proposals,
        proposals_with_features=stats.proposals_with_features,
        round_ns=stats.round_ns,
        exposed_draft_ns=stats.exposed_draft_ns,
        draft_compute_ns=stats.draft_compute_ns,
        target_compute_ns=stats.verify_compute_ns,
        sources=tuple(SourceTokens(of.source, of.drafted, of.verified, of.accepted) for of in stats.sources),
    )

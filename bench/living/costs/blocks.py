"""Blocks of the arms of a pair, and their paired comparison.

The arms of a pair answer the same prompts with the same seeds, so they compute the same tokens. Each arm is a
caller of its own (an API key), and prefix caches never cross callers. No two pairs share a prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count, islice

from bench.living.workloads import WORKLOADS, prompts
from bench.loops.sides import Cpu
from galley.bench.closed_loop import GatewayLoop, Load, LoopBlock, speed_of, tagged
from galley.bench.summary import MS, PERCENTS, Interval, percentile, ratio_interval
from galley.bench.workloads import Prompt
from galley.client.client import AsyncClient
from galley.stack.stack import Stack

STREAMS = 16
_SETTLE_S = 0.3
"""Work that a block leaves behind counts for it until so long after its end."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one arm in one pair. CPU time is that of all processes of the stack."""

    pair: int
    arm: str
    temperature: float
    tokens: int
    tokens_per_s: float
    cpu_ms_per_token: float
    cpu_s: Mapping[str, float]
    first_token_ms: tuple[float, ...]

    @property
    def first_token_p50_ms(self) -> float:
        return self.first_token_ms[0]


class Meter:
    """The CPU time of each process of a stack since the meter was made."""

    def __init__(self, stack: Stack) -> None:
        self._parts = {part: Cpu([stack.pid(part)]) for part in stack.running}
        self._before = self._now()

    def spent(self) -> dict[str, float]:
        return {part: round(after - self._before[part], 3) for part, after in self._now().items()}

    def _now(self) -> dict[str, float]:
        return {part: cpu.seconds() for part, cpu in self._parts.items()}


def figures_of(blocks: Sequence[LoopBlock], cpu_s: Mapping[str, float]) -> Figures:
    """Return the figures of blocks of one arm and pair, together."""
    load, tokens = blocks[0].load, sum(block.given for block in blocks)
    first_s = [answer.at_s[0] for block in blocks for answer in block.answers if answer.at_s]
    return Figures(
        load.pair,
        load.arm,
        load.temperature,
        tokens,
        speed_of(blocks),
        MS * sum(cpu_s.values()) / max(1, tokens),
        cpu_s,
        tuple(round(MS * percentile(first_s, percent), 1) for percent in PERCENTS),
    )


@asynccontextmanager
async def open_loops(
    stack: Stack, keys: Mapping[str, str], speculation: str, *, no_audit: bool = False
) -> AsyncIterator[dict[str, GatewayLoop]]:
    """Yield a loop for each arm, that of a caller with a key of its own."""
    async with AsyncExitStack() as held:
        loops = {}
        for arm, key in keys.items():
            client = await held.enter_async_context(AsyncClient(stack.gateways[0], api_key=key))
            loops[arm] = GatewayLoop(client, speculation=speculation, no_audit=no_audit)
        yield loops


async def run_block(stack: Stack, loop: GatewayLoop, load: Load) -> tuple[LoopBlock, Figures]:
    meter = Meter(stack)
    block = await loop.run(load)
    await asyncio.sleep(_SETTLE_S)
    return block, figures_of([block], meter.spent())


def new_prompts(name: str) -> Iterator[Prompt]:
    """Yield short prompts without end; those of another name differ from their first token on."""
    by_workload = [prompts(workload, seed=3) for workload in WORKLOADS]
    return (tagged(next(by_workload[at % len(by_workload)]), f"{name}.{at}") for at in count())


def load_of(pair: int, arm: str, temperature: float, chosen: Sequence[Prompt], max_tokens: int) -> Load:
    return Load(pair, arm, STREAMS, temperature, tuple(chosen), max_tokens, seed=1 + pair)


def temperature_of(pair: int) -> float:
    """Return the temperature of a pair, where it alternates from pair to pair."""
    return 0.7 if pair % 2 else 0.0


def next_prompts(stream: Iterator[Prompt], number: int) -> tuple[Prompt, ...]:
    return tuple(islice(stream, number))


def paired(figures: Sequence[Figures], arm: str, base: str, value: Callable[[Figures], float]) -> Interval:
    """Return the median over pairs and temperatures of an arm's value over that of its base."""
    values = {(one.pair, one.temperature, one.arm): value(one) for one in figures}
    both = [key[:2] for key in values if key[2] == arm and (*key[:2], base) in values]
    return ratio_interval([values[*key, arm] for key in both], [values[*key, base] for key in both])


@dataclass(frozen=True, slots=True)
class Comparison:
    """An arm over its base: the medians of the pairs' ratios."""

    arm: str
    base: str
    speed: Interval
    cpu: Interval
    first_token: Interval


def compare(figures: Sequence[Figures], arm: str, base: str) -> Comparison:
    return Comparison(
        arm,
        base,
        paired(figures, arm, base, lambda one: one.tokens_per_s),
        paired(figures, arm, base, lambda one: one.cpu_ms_per_token),
        paired(figures, arm, base, lambda one: one.first_token_p50_ms),
    )


def differing(blocks: Sequence[LoopBlock]) -> int:
    """Count the answers whose tokens are not those of the first arm that was asked the same."""
    first: dict[str, list[tuple[int, ...]]] = {}
    found = 0
    for block in blocks:
        tokens = [answer.tokens for answer in block.answers]
        truth = first.setdefault(block.load.prompts[0].text, tokens)
        found += sum(mine != theirs for mine, theirs in zip(tokens, truth, strict=True))
    return found


def report(part: str, *figures: Figures) -> None:
    """Print figures while the benchmark runs."""
    for one in figures:
        print(
            f"{part}: pair {one.pair + 1}, {one.arm}, T = {one.temperature:g}: {one.tokens} tokens, "
            f"{one.tokens_per_s:.1f}/s, {one.cpu_ms_per_token:.3f} ms of CPU a token, "
            f"first token {one.first_token_p50_ms:.0f} ms",
            flush=True,
        )

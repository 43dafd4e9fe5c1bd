"""A closed loop: so many streams at once, each asking its next prompt when its answer has ended.

A block is a fixed list of prompts, answered by one arm at one number of streams and one temperature;
galley/bench/closed_loop.py says what its speed is.

Every prompt of a run begins with a tag of its own, `(pair.streams.arm.temperature.number)`, which stands
in the first block of every cache: no side is flattered by a prefix cache that has seen the 96 prompts
before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from galley.bench.answers import Prompt
from galley.bench.closed_loop import WARM_UP, Load, LoopBlock, LoopSide, run_all, tagged
from galley.bench.workloads import PROMPT_SETS, load_prompts

_LEAST_ANSWERS = 3
_ANSWERS_A_STREAM = 2


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
    # And no draft learns from another arm's answers, nor from an earlier pair's.
    label = f"{streams}/{temperature:g}/{arm}/{pair + 1}"
    chosen = tuple(
        tagged(
            replace(prompts[at % len(prompts)], label=label),
            f"{pair + 1:02}.{streams:02}.{plan.arms.index(arm)}.{temperature:.1f}.{at % 1000:03}",
        )
        for at in range(first, first + count)
    )
    return Load(pair, arm, streams, temperature, chosen, plan.max_tokens, plan.seed + 1000 * (pair + 1))


async def run_loads(
    plan: LoopPlan,
    sides: dict[str, LoopSide],
    tell: Callable[[str], None],
    after_block: Callable[[LoopBlock], None] = lambda _: None,
) -> list[LoopBlock]:
    """Run all blocks of a plan, one at a time; the warm-up is not among those returned."""
    return await run_all(list(loads(plan)), sides, tell, after_block)


def block_record(block: LoopBlock) -> dict[str, Any]:
    """For the JSON of a run."""
    load = block.load
    return {
        "pair": load.pair,
        "arm": load.arm,
        "workload": load.workload,
        "streams": load.streams,
        "temperature": load.temperature,
        "answers": len(block.answers),
        "tokens": block.given,
        "counted": block.tokens,
        "wall_s": round(block.wall_s, 4),
        "cpu_s": round(block.cpu_s, 4),
        "prompts": [prompt.id for prompt in load.prompts],
    }

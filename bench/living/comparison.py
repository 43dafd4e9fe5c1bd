"""Compare two drafts: a stack of each answers the same new prompts, in alternating blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bench.living.workloads import WORKLOADS, prompts
from galley import AsyncClient
from galley.bench.answers import Rounds
from galley.bench.closed_loop import AUTO, GatewayLoop, Load, LoopBlock, fixed_arm
from galley.bench.summary import Interval, ratio_interval, speculated
from galley.bench.workloads import Prompt
from galley.core.names import MODEL
from galley.stack.options import StackOptions
from galley.stack.stack import Stack

BEFORE, AFTER = "before", "after"
_SEED = 2
"""Of prompts that the traffic does not have."""
_PROMPTS_OF_BLOCK = 2
_ACCEPTANCE_ARM = fixed_arm(MODEL, 4)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Draft `after` beside draft `before`: all at one stream and T = 0.

    `first` is the share of rounds whose first draft token was accepted, by draft and workload, with four
    tokens of the draft's model in each round. `speed` is the ratio of tokens/s in mode AUTO.
    """

    first: Mapping[str, Mapping[str, float]]
    speed: Interval
    speed_by_workload: Mapping[str, Interval]

    @property
    def acceptance_gain(self) -> float:
        """Return the smallest gain of the workloads."""
        return min(self.first[AFTER][name] - self.first[BEFORE][name] for name in WORKLOADS)


async def compare(before: Path, after: Path, pairs: int, max_tokens: int) -> Comparison:
    async with AsyncExitStack() as opened:
        loops: dict[str, GatewayLoop] = {}
        for name, draft in ((BEFORE, before), (AFTER, after)):
            stack = await opened.enter_async_context(Stack(StackOptions(draft_model=str(draft))))
            loops[name] = GatewayLoop(await opened.enter_async_context(AsyncClient(stack.gateways[0])))
        streams = {name: prompts(name, _SEED) for name in WORKLOADS}
        blocks: dict[tuple[str, str, str], list[LoopBlock]] = {}
        for pair in range(-1, pairs):  # the first one warms up
            sides = (BEFORE, AFTER) if pair % 2 else (AFTER, BEFORE)
            for workload, stream in streams.items():
                chosen = _next(stream)
                for arm in (AUTO, _ACCEPTANCE_ARM):
                    for side in sides:
                        load = Load(pair, arm, 1, 0.0, chosen, max_tokens, seed=1, workload=workload)
                        block = await loops[side].run(load)
                        if pair >= 0:
                            blocks.setdefault((side, workload, arm), []).append(block)
    by_workload = {name: _speed([name], blocks) for name in WORKLOADS}
    first = {
        side: {name: _first(speculated(blocks[side, name, _ACCEPTANCE_ARM])) for name in WORKLOADS}
        for side in (BEFORE, AFTER)
    }
    return Comparison(first, _speed(WORKLOADS, blocks), by_workload)


def _next(stream: Iterator[Prompt]) -> tuple[Prompt, ...]:
    return tuple(islice(stream, _PROMPTS_OF_BLOCK))


def _speed(workloads: Sequence[str], blocks: Mapping[tuple[str, str, str], Sequence[LoopBlock]]) -> Interval:
    """Return the ratio of tokens/s over the pairs of these workloads."""
    speeds = {
        side: [block.tokens_per_s for name in workloads for block in blocks[side, name, AUTO]]
        for side in (BEFORE, AFTER)
    }
    return ratio_interval(speeds[AFTER], speeds[BEFORE])


def _first(rounds: Rounds) -> float:
    return next(iter(rounds.by_position), 0.0)

"""Compare two drafts: a stack of each answers the same new prompts, in alternating blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from galley import AsyncClient
from galley.bench.answers import Rounds
from galley.bench.closed_loop import AUTO, GatewayLoop, Load, LoopBlock, fixed_arm
from galley.bench.summary import Interval, median_interval, ratio_interval, speculated
from galley.bench.workloads import Prompt
from galley.core.names import MODEL
from galley.stack.options import StackOptions
from galley.stack.stack import Stack

BEFORE, AFTER = "before", "after"
NEW_PROMPTS = 2
"""Seed of prompts that the traffic does not have."""
_ACCEPTANCE_ARM = fixed_arm(MODEL, 4)

_Blocks = dict[tuple[str, str, str], list[LoopBlock]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Draft `after` beside draft `before`, at T = 0.

    `first` is the share of rounds whose first draft token was accepted, by draft and workload, with four
    tokens of the draft's model in each round. `gain` is the difference of this share over the pairs, all
    workloads together. `speed` is the ratio of tokens/s at one stream in mode AUTO.
    """

    first: Mapping[str, Mapping[str, float]]
    gain: Interval
    speed: Interval
    speed_by_workload: Mapping[str, Interval]

    @property
    def acceptance_gain(self) -> float:
        """Return the smallest gain of the workloads."""
        after = self.first[AFTER]
        return min(after[name] - before for name, before in self.first[BEFORE].items())


@dataclass(frozen=True, slots=True)
class BlockSize:
    """Prompts of a workload in a block that measures speed and in one that measures acceptance.

    The latter has `streams`. Both take their prompts from the same ones.
    """

    speed: int = 2
    acceptance: int = 2
    streams: int = 1


async def compare(
    before: Path,
    after: Path,
    sources: Mapping[str, Iterator[Prompt]],
    pairs: int,
    max_tokens: int,
    size: BlockSize = BlockSize(),
) -> Comparison:
    """Compare on the next prompts of each workload of `sources`."""
    async with AsyncExitStack() as opened:
        loops: dict[str, GatewayLoop] = {}
        for name, draft in ((BEFORE, before), (AFTER, after)):
            stack = await opened.enter_async_context(Stack(StackOptions(draft_model=str(draft))))
            loops[name] = GatewayLoop(await opened.enter_async_context(AsyncClient(stack.gateways[0])))
        blocks: _Blocks = {}
        for pair in range(-1, pairs):  # the first one warms up
            sides = (BEFORE, AFTER) if pair % 2 else (AFTER, BEFORE)
            for workload, source in sources.items():
                for load in _loads(pair, workload, source, max_tokens, size):
                    for side in sides:
                        block = await loops[side].run(load)
                        if pair >= 0:
                            blocks.setdefault((side, workload, load.arm), []).append(block)
    return _compared(list(sources), blocks)


def _loads(
    pair: int, workload: str, source: Iterator[Prompt], max_tokens: int, size: BlockSize
) -> Sequence[Load]:
    chosen = tuple(islice(source, max(size.speed, size.acceptance)))
    parts = ((AUTO, 1, chosen[: size.speed]), (_ACCEPTANCE_ARM, size.streams, chosen[: size.acceptance]))
    return [
        Load(pair, arm, streams, 0.0, part, max_tokens, seed=1, workload=workload)
        for arm, streams, part in parts
    ]


def _compared(workloads: Sequence[str], blocks: _Blocks) -> Comparison:
    of_arm = {side: [blocks[side, name, _ACCEPTANCE_ARM] for name in workloads] for side in (BEFORE, AFTER)}
    first = {
        side: {name: _first(of) for name, of in zip(workloads, by_workload, strict=True)}
        for side, by_workload in of_arm.items()
    }
    by_pair = {
        side: [_first(of) for of in zip(*by_workload, strict=True)] for side, by_workload in of_arm.items()
    }
    gains = [after - before for before, after in zip(by_pair[BEFORE], by_pair[AFTER], strict=True)]
    speeds = {name: _speed([name], blocks) for name in workloads}
    return Comparison(first, median_interval(gains), _speed(workloads, blocks), speeds)


def _speed(workloads: Sequence[str], blocks: _Blocks) -> Interval:
    """Return the ratio of tokens/s over the pairs of these workloads."""
    speeds = {
        side: [block.tokens_per_s for name in workloads for block in blocks[side, name, AUTO]]
        for side in (BEFORE, AFTER)
    }
    return ratio_interval(speeds[AFTER], speeds[BEFORE])


def _first(blocks: Iterable[LoopBlock]) -> float:
    rounds: Rounds = speculated(blocks)
    return next(iter(rounds.by_position), 0.0)

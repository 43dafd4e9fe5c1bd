"""Which blocks a measurement of speculation is made of, and in which order.

Nobody may gain by having been asked before. Prefixes are kept by the target: so prompts carry a tag. Answers
are learnt from by the draft, within a workload's label: so each arm has labels of its own in each cell, and a
new one whenever its prompts come again. What a label begins with is therefore never better than in service.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.benching.closed_loop import WARM_UP, Load, tagged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from services.benching.answers import Prompt
    from services.benching.workloads import Workload

_SEEDS_A_PAIR = 1000
# Labels are of these characters, and at most 64 of them.
_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9_.:/-]")
_NAME_CHARS = 24


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload at one number of streams and one temperature, answered by each of `arms`."""

    workload: Workload
    streams: int
    temperature: float
    arms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large blocks are: a block asks `prompts` prompts, and at least one a stream."""

    prompts: int
    max_tokens: int
    seed: int


def pair_loads(cell: Cell, pair: int, sizes: Sizes, first: int, *, fresh: bool = True) -> list[Load]:
    """The blocks of one pair of a cell, side by side; whose is first rotates with the pair.

    All arms get the same prompts and seeds, the next pair the prompts after them. With `fresh`, prompts are
    tagged with the number of their load in the run, which goes up from `first`, so that no prefix cache helps
    anybody; else those of each block with the same tags, so that it helps everybody.
    """
    shift = pair % len(cell.arms)
    arms = cell.arms[shift:] + cell.arms[:shift]
    return [
        Load(
            pair=pair,
            arm=arm,
            streams=cell.streams,
            temperature=cell.temperature,
            prompts=_prompts(cell, pair, arm, sizes, number if fresh else None),
            max_tokens=sizes.max_tokens,
            seed=sizes.seed + _SEEDS_A_PAIR * (pair + 1),
            workload=cell.workload.name,
        )
        for number, arm in enumerate(arms, first)
    ]


def _prompts(cell: Cell, pair: int, arm: str, sizes: Sizes, number: int | None) -> tuple[Prompt, ...]:
    """`number` is None for tags that come again."""
    given = cell.workload.prompts
    count = max(sizes.prompts, cell.streams)
    # So many pairs use no prompt twice.
    group = (pair + 1) // max(1, len(given) // count)
    name = _NOT_IN_LABELS.sub("_", cell.workload.name)[:_NAME_CHARS]
    picked = []
    for at in range(count):
        prompt = given[((pair + 1) * count + at) % len(given)]
        copy = at // len(given)
        tag = f"{copy}" if number is None else f"{number:04}.{at:03}"
        label = f"{name}/{cell.streams}/{cell.temperature:g}/{arm}/{group}.{copy}"
        picked.append(tagged(replace(prompt, label=label), tag))
    return tuple(picked)


def loads(cells: Sequence[Cell], pairs: int, sizes: Sizes) -> Iterator[Load]:
    """A warm-up of every arm in its largest cell, then pair by pair every cell."""
    warm_ups: dict[str, Cell] = {}
    for cell in sorted(cells, key=lambda cell: cell.streams):
        warm_ups |= dict.fromkeys(cell.arms, cell)
    number = 0
    for arm, cell in warm_ups.items():
        only = Cell(cell.workload, cell.streams, cell.temperature, (arm,))
        yield from pair_loads(only, WARM_UP, sizes, number)
        number += 1
    for pair in range(pairs):
        for cell in cells:
            yield from pair_loads(cell, pair, sizes, number)
            number += len(cell.arms)

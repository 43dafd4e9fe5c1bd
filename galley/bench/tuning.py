"""The blocks of a measurement of speculation, their order, and their run against a gateway.

No arm may gain from earlier blocks. The target caches prefixes, so prompts carry a tag of their pair, and a
block that does not count puts them into the cache for all arms; all arms of a pair answer the same texts. The
draft learns from answers under a workload's label, so each arm has labels of its own in each cell and pair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from galley.bench.closed_loop import (
    AUTO,
    OFF,
    WARM_UP,
    GatewayLoop,
    Load,
    LoopBlock,
    fixed_arm,
    run_all,
    tagged,
)
from galley.bench.workloads import Prompt, Workload
from galley.client.client import AsyncClient

_SEEDS_A_PAIR = 1000
# The characters that labels may not have, and their greatest length.
_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9_.:/-]")
_LABEL_CHARS = 64
_NAME_CHARS = 24
_PRIMING = "prime"
# With several streams, answers are 0.5 to 1.5 times as long as requested, spread by the golden section.
_SHORTEST = 0.5
_GOLDEN = 0.6180339887498949
# The strategies of a run that names none, as far as the gateway has them.
_DEFAULT = ("ngram", "model", "features", "hybrid")


@dataclass(frozen=True, slots=True)
class Cell:
    """Work for each of `arms`. `index`, the workload's place in the run, keeps labels of long names apart."""

    workload: Workload
    streams: int
    temperature: float
    arms: tuple[str, ...]
    index: int = 0

    def cut(self, max_tokens: int) -> Cell:
        """Return the cell with answers of at most `max_tokens`, also where prompts have their own bounds."""
        given = self.workload.prompts
        prompts = tuple(replace(one, max_tokens=min(one.max_tokens, max_tokens)) for one in given)
        return replace(self, workload=replace(self.workload, prompts=prompts))


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of a block: at least `turns` prompts each of several streams. `nonce` keeps runs apart."""

    prompts: int
    max_tokens: int
    seed: int
    nonce: str = ""
    turns: int = 2


def pair_loads(
    cell: Cell, pair: int, sizes: Sizes, tag_of: Callable[[str], str] = lambda _: ""
) -> list[Load]:
    """Return a block an arm, with the same seeds, and the same prompts for arms of the same tag.

    The first arm rotates with the pair.
    """
    shift = pair % len(cell.arms)
    return [
        _load(cell, pair, arm, replace(sizes, nonce=sizes.nonce + tag_of(arm)))
        for arm in cell.arms[shift:] + cell.arms[:shift]
    ]


def priming(cell: Cell, pair: int, sizes: Sizes) -> Load:
    """Return the block that puts the prompts of a pair into the target's cache, and does not count.

    A later turn follows the answer to the one before, so conversations are asked whole.
    """
    load = _load(cell, pair, _PRIMING, sizes)
    prompts = tuple(one if one.later_turns else replace(one, max_tokens=1) for one in load.prompts)
    return replace(load, pair=WARM_UP, arm=OFF, max_tokens=1, prompts=prompts)


def _load(cell: Cell, pair: int, arm: str, sizes: Sizes) -> Load:
    return Load(
        pair=pair,
        arm=arm,
        streams=cell.streams,
        temperature=cell.temperature,
        prompts=_prompts(cell, pair, arm, sizes),
        max_tokens=sizes.max_tokens,
        seed=sizes.seed + _SEEDS_A_PAIR * (pair + 1),
        workload=cell.workload.name,
    )


def _prompts(cell: Cell, pair: int, arm: str, sizes: Sizes) -> tuple[Prompt, ...]:
    given = cell.workload.prompts
    count = max(sizes.prompts, cell.streams * sizes.turns if cell.streams > 1 else 1)
    picked = []
    for at in range(count):
        prompt = given[((pair + 1) * count + at) % len(given)]
        copy = at // len(given)
        label = _label(cell, f"{arm}/{pair + 1}.{copy}", sizes.nonce)
        labelled = replace(prompt, label=label, max_tokens=prompt.max_tokens or _length(at, cell, sizes))
        picked.append(tagged(labelled, f"{sizes.nonce}.{pair + 1:02}.{copy}"))
    return tuple(picked)


def _length(at: int, cell: Cell, sizes: Sizes) -> int:
    # Answers of one length would end together, and their successors would share a prefill.
    if cell.streams == 1:
        return sizes.max_tokens
    return max(1, round(sizes.max_tokens * (_SHORTEST + at * _GOLDEN % 1)))


def _label(cell: Cell, of: str, nonce: str) -> str:
    own = f"/{cell.index}/{cell.streams}/{cell.temperature:g}/{of}/{nonce}"
    name = _NOT_IN_LABELS.sub("_", cell.workload.name)
    return name[: max(0, min(_NAME_CHARS, _LABEL_CHARS - len(own)))] + own


def loads(cells: Sequence[Cell], pairs: int, sizes: Sizes) -> Iterator[Load]:
    """Yield a warm-up of every arm in its largest cell, then every cell pair by pair, after its priming."""
    warm_ups: dict[str, Cell] = {}
    for cell in sorted(cells, key=lambda cell: cell.streams):
        warm_ups |= dict.fromkeys(cell.arms, cell)
    for arm, cell in warm_ups.items():
        yield from pair_loads(replace(cell, arms=(arm,)), WARM_UP, sizes)
    for pair in range(pairs):
        for cell in cells:
            yield priming(cell, pair, sizes)
            yield from pair_loads(cell, pair, sizes)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The measurement to make. Without strategies: off, auto, and those of `_DEFAULT` that are offered.

    `widths` are the most draft tokens for one position of fixed strategies.
    """

    workloads: tuple[Workload, ...]
    streams: tuple[int, ...]
    strategies: tuple[str, ...]
    k: tuple[int, ...]
    temperatures: tuple[float, ...]
    repeats: int
    sizes: Sizes
    widths: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class Measured:
    model: str
    arms: tuple[str, ...]
    blocks: tuple[LoopBlock, ...]


async def measure(
    tuning: Tuning, client: AsyncClient, report: Callable[[str], None], progress: Callable[[float], None]
) -> Measured:
    """Run every block. Raises ValueError for a strategy or k that the gateway lacks, GalleyRpcError."""
    info = await client.model_info()
    arms = arms_of(tuning, info.strategies, info.max_draft_tokens)
    cells = [
        Cell(workload, streams, temperature, arms, index)
        for streams in tuning.streams
        for index, workload in enumerate(tuning.workloads)
        for temperature in tuning.temperatures
    ]
    side = GatewayLoop(client)
    every = list(loads(cells, tuning.repeats, tuning.sizes))
    blocks = await run_all(every, dict.fromkeys(arms, side), report, progress=progress)
    return Measured(info.model, arms, tuple(blocks))


def arms_of(tuning: Tuning, offered: Sequence[str], max_k: int) -> tuple[str, ...]:
    """Return the arms, `off` as the baseline first, fixed strategies once for each k and width.

    Raises ValueError.
    """
    named = tuning.strategies or (OFF, AUTO, *(name for name in _DEFAULT if name in offered))
    if unknown := [name for name in named if name not in {OFF, AUTO, *offered}]:
        raise ValueError(
            f"strategy: must be one of {', '.join((OFF, AUTO, *offered))} here, got {', '.join(unknown)}"
        )
    if max_k and max(tuning.k) > max_k:
        raise ValueError(f"k: must be at most {max_k} at this gateway, got {max(tuning.k)}")
    fixed = [name for name in named if name not in {OFF, AUTO}]
    arms = [fixed_arm(name, k, width) for name in fixed for k in tuning.k for width in tuning.widths]
    return tuple(dict.fromkeys((OFF, *((AUTO,) if AUTO in named else ()), *arms)))

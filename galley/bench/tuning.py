"""`galley bench` without its command line: what is asked of a gateway, and its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from galley.bench.blocks import Cell, Sizes, loads
from galley.bench.closed_loop import LoopBlock, run_all
from galley.bench.gateway import AUTO, OFF, GatewayLoop
from galley.bench.workloads import Workload
from galley.client.client import AsyncClient

# What is tried where nothing is named, as far as the gateway offers it.
_TRIED = ("ngram", "model", "hybrid")


@dataclass(frozen=True, slots=True)
class Tuning:
    """What to measure; no strategies: off, auto, and those of ngram, model and hybrid that are offered."""

    workloads: tuple[Workload, ...]
    streams: tuple[int, ...]
    strategies: tuple[str, ...]
    k: tuple[int, ...]
    temperatures: tuple[float, ...]
    repeats: int
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Measured:
    """The blocks, and the name of the model that the gateway serves."""

    model: str
    arms: tuple[str, ...]
    blocks: tuple[LoopBlock, ...]


async def measure(tuning: Tuning, client: AsyncClient, tell: Callable[[str], None]) -> Measured:
    """Run every block against the gateway of `client`.

    Raises ValueError for a strategy or k that it does not offer, GalleyRpcError where an answer fails.
    """
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
    blocks = await run_all(every, dict.fromkeys(arms, side), tell)
    return Measured(info.model, arms, tuple(blocks))


def arms_of(tuning: Tuning, offered: Sequence[str], max_k: int) -> tuple[str, ...]:
    """`off` first, for all is compared with it; fixed strategies once for each k. Raises ValueError."""
    named = tuning.strategies or (OFF, AUTO, *(name for name in _TRIED if name in offered))
    if unknown := [name for name in named if name not in {OFF, AUTO, *offered}]:
        raise ValueError(f"no strategy {', '.join(unknown)}; there are {', '.join((OFF, AUTO, *offered))}")
    if max_k and max(tuning.k) > max_k:
        raise ValueError(f"k is at most {max_k} at this gateway, not {max(tuning.k)}")
    fixed = [name for name in named if name not in {OFF, AUTO}]
    arms = [OFF, *((AUTO,) if AUTO in named else ()), *(f"{name}-{k}" for name in fixed for k in tuning.k)]
    return tuple(dict.fromkeys(arms))

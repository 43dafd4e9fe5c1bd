"""Run the blocks of `galley bench` against a gateway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from galley.bench.blocks import Cell, Sizes, loads
from galley.bench.closed_loop import LoopBlock, run_all
from galley.bench.gateway import AUTO, OFF, GatewayLoop
from galley.bench.workloads import Workload
from galley.client.client import AsyncClient

# The strategies of a run that names none, as far as the gateway has them.
_DEFAULT = ("ngram", "model", "hybrid")


@dataclass(frozen=True, slots=True)
class Tuning:
    """The measurement to make. Without strategies: off, auto, and ngram, model and hybrid if offered."""

    workloads: tuple[Workload, ...]
    streams: tuple[int, ...]
    strategies: tuple[str, ...]
    k: tuple[int, ...]
    temperatures: tuple[float, ...]
    repeats: int
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Measured:
    model: str
    arms: tuple[str, ...]
    blocks: tuple[LoopBlock, ...]


async def measure(tuning: Tuning, client: AsyncClient, report: Callable[[str], None]) -> Measured:
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
    blocks = await run_all(every, dict.fromkeys(arms, side), report)
    return Measured(info.model, arms, tuple(blocks))


def arms_of(tuning: Tuning, offered: Sequence[str], max_k: int) -> tuple[str, ...]:
    """Return the arms, `off` as the baseline first, fixed strategies once for each k. Raises ValueError."""
    named = tuning.strategies or (OFF, AUTO, *(name for name in _DEFAULT if name in offered))
    if unknown := [name for name in named if name not in {OFF, AUTO, *offered}]:
        raise ValueError(
            f"no strategy {', '.join(unknown)}; the gateway has {', '.join((OFF, AUTO, *offered))}"
        )
    if max_k and max(tuning.k) > max_k:
        raise ValueError(f"k: must be at most {max_k} at this gateway, got {max(tuning.k)}")
    fixed = [name for name in named if name not in {OFF, AUTO}]
    arms = [OFF, *((AUTO,) if AUTO in named else ()), *(f"{name}-{k}" for name in fixed for k in tuning.k)]
    return tuple(dict.fromkeys(arms))

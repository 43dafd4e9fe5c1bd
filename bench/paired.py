"""Timing of two or more pieces of work in alternating blocks: A B, B A, A B ..."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Work = Callable[[], object]

MIN_BLOCK_S = 0.04
MAX_REPEATS = 200


@dataclass(frozen=True, slots=True)
class Timed:
    """Wall and CPU seconds (all threads of this process) of one call, for each pair."""

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]


def alternate(work: Mapping[str, Work], pairs: int, min_block_s: float = MIN_BLOCK_S) -> dict[str, Timed]:
    """Time each piece of `work` once a pair, after a warm-up of each.

    Quick work is repeated within its block, so often that the block takes about `min_block_s` by the time of
    the warm-up. The mean of a block counts. The piece that goes first rotates with the pair.
    """
    repeats = {name: _repeats(piece, min_block_s) for name, piece in work.items()}
    wall: dict[str, list[float]] = {name: [] for name in work}
    cpu: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    for pair in range(pairs):
        shift = pair % len(names)
        for name in names[shift:] + names[:shift]:
            wall_s, cpu_s = _block(work[name], repeats[name])
            wall[name].append(wall_s)
            cpu[name].append(cpu_s)
    return {name: Timed(tuple(wall[name]), tuple(cpu[name])) for name in names}


def fastest(work: Mapping[str, Work], tries: int = 3) -> str:
    """Return the quickest piece of work, by the least of `tries` calls after a warm-up."""
    best = {}
    for name, piece in work.items():
        piece()
        best[name] = min(_block(piece, 1)[0] for _ in range(tries))
    return min(best, key=lambda name: best[name])


def _repeats(piece: Work, min_block_s: float) -> int:
    piece()
    once_s = max(_block(piece, 1)[0], 1e-6)
    return max(1, min(MAX_REPEATS, round(min_block_s / once_s)))


def _block(piece: Work, repeats: int) -> tuple[float, float]:
    cpu_before, began = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        piece()
    wall_s = time.perf_counter() - began
    return wall_s / repeats, (time.process_time() - cpu_before) / repeats

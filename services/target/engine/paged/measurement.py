"""Measure what a step of the paged engine costs on this machine.

Steps are timed once at start; the scheduler decides by the curve. A step of R rows is timed as on a busy
replica: several sessions with some context, each with a verify chunk of a few rows. The blocks that it writes
are still free.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from galley.core.cost.model import StepTimes
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, StepChunk, StepPlan
from services.target.engine.paged.target import StepEngine
from services.target.engine.protocol import EngineInfo

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXT = 128
_CHUNK_ROWS = 8
_REPEATS = 3
# After _SOON_NS points are measured once, after _ENOUGH_NS not at all.
_SOON_NS = 2_000_000_000
_ENOUGH_NS = 6_000_000_000
_GREEDY = SamplingParams(temperature=0.0)


def measure(engine: StepEngine, clock: Callable[[], int] = time.perf_counter_ns) -> StepTimes:
    """Return the times of steps of ROWS rows, the best of three each; blocks, for about two seconds in all.

    Call it before anything else runs on the engine. On a slow machine later points are timed once or left
    out. Points whose sessions do not fit into the KV pool are left out.
    """
    info = engine.info
    least = _plan(info, 1) or StepPlan((_chunk(info, min(1, info.context_window - 1), 1, range(1)),))
    engine.run(least)  # the first step compiles and allocates
    start = clock()
    points: list[tuple[int, int]] = []
    for rows in ROWS:
        plan = least if rows == 1 else _plan(info, rows)
        if plan is None or clock() - start > _ENOUGH_NS:
            break
        points.append((rows, _best_ns(engine, plan, clock, start + _SOON_NS)))
    return StepTimes.measured(points)


def _best_ns(engine: StepEngine, plan: StepPlan, clock: Callable[[], int], until: int) -> int:
    best = 0
    for _ in range(_REPEATS):
        since = clock()
        engine.run(plan)
        now = clock()
        took = max(1, now - since)
        best = min(best or took, took)
        if now > until:
            break
    return best


def _plan(info: EngineInfo, rows: int) -> StepPlan | None:
    """Return a step of `rows` rows; None if its sessions do not fit into the KV pool or context window."""
    context = min(_CONTEXT, info.context_window // 2)
    sessions = max(1, rows // _CHUNK_ROWS)
    blocks = -(-(context + _CHUNK_ROWS) // info.kv_block_tokens)
    if sessions * blocks > info.kv_blocks or context + _CHUNK_ROWS > info.context_window:
        return None
    return StepPlan(
        tuple(
            _chunk(info, context, rows // sessions, range(i * blocks, (i + 1) * blocks))
            for i in range(sessions)
        )
    )


def _chunk(info: EngineInfo, start: int, rows: int, blocks: range) -> StepChunk:
    """Return a chunk whose rows are all sampled, as in a verification."""
    tokens = [token % info.vocab_size for token in range(start + rows)]
    draft_tokens = tuple(tokens[start + 1 :])
    draw = Draw(_GREEDY, tokens[: start + 1], 1, frozenset(), 0, draft_tokens)
    return StepChunk(start, tokens[start:], tuple(blocks), rows, draw)

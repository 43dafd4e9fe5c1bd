"""Measure what a step of the paged engine costs on this machine. The blocks that it writes are still free."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from galley.core.cost.model import StepTimes
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw, StepChunk, StepPlan
from services.target.engine.measurement import CHUNK_ROWS, CONTEXT, time_steps
from services.target.engine.paged.target import StepEngine
from services.target.engine.protocol import EngineInfo

_GREEDY = SamplingParams(temperature=0.0)


def measure(engine: StepEngine, clock: Callable[[], int] = time.perf_counter_ns) -> StepTimes:
    """Return the times of steps, as `time_steps` does. Call it before anything else runs on the engine."""
    info = engine.info

    def prepare(rows: int) -> Callable[[], object] | None:
        plan = _plan(info, rows)
        if plan is None and rows == 1:
            plan = StepPlan((_chunk(info, min(1, info.context_window - 1), 1, range(1)),))
        return None if plan is None else partial(engine.run, plan)

    return time_steps(prepare, clock)


def _plan(info: EngineInfo, rows: int) -> StepPlan | None:
    """Return a step of `rows` rows; None if its sessions do not fit into the KV pool or context window."""
    context = min(CONTEXT, info.context_window // 2)
    sessions = max(1, rows // CHUNK_ROWS)
    blocks = -(-(context + CHUNK_ROWS) // info.kv_block_tokens)
    if sessions * blocks > info.kv_blocks or context + CHUNK_ROWS > info.context_window:
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

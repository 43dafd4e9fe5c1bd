"""Measure what a step of vLLM costs on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from galley.core.cost.model import StepTimes
from galley.core.errors import GalleyError
from galley.core.sampling_params import SamplingParams
from galley.core.step import Draw
from services.target.engine.measurement import CHUNK_ROWS, CONTEXT, REPEATS, time_steps
from services.target.engine.vllm.protocol import NewSequence, SteppedCore

# So that the last token is not of a block that the sequences share.
_PROMPT = CONTEXT + 1


def measure(core: SteppedCore, clock: Callable[[], int] = time.perf_counter_ns) -> StepTimes:
    """Return the times of steps, as `time_steps` does. Call it before anything else runs on the core."""
    bench = _Bench(core)
    try:
        return time_steps(bench.prepare, clock)
    finally:
        bench.end()


class _Bench:
    """Sequences that have read the same prompt, so that a step of them verifies draft tokens only."""

    def __init__(self, core: SteppedCore) -> None:
        self._core = core
        self._drafts: dict[str, tuple[int, ...]] = {}
        self._last_id = 0

    def prepare(self, rows: int) -> Callable[[], object] | None:
        """Return what runs a step of `rows` rows; None if its sequences do not fit."""
        self.end()
        info = self._core.info
        sessions = max(1, rows // min(CHUNK_ROWS, 1 + self._core.max_draft_tokens))
        prompt = min(_PROMPT, max(1, info.context_window // 2))
        longest = prompt + (2 + REPEATS) * CHUNK_ROWS
        blocks = -(-longest // info.kv_block_tokens)
        fits = longest <= info.context_window and sessions * blocks <= info.kv_blocks
        if rows > 1 and not (fits and sessions <= self._core.max_sequences):
            return None
        drafts = tuple(self._token(prompt + i) for i in range(rows // sessions - 1))
        self._drafts = {self._add(prompt): drafts for _ in range(sessions)}
        self._read_prompts()
        return partial(self._core.step, self._drafts)

    def end(self) -> None:
        self._core.end(self._drafts)
        self._drafts = {}

    def _add(self, prompt: int) -> str:
        self._last_id += 1
        name, tokens = f"measured {self._last_id}", tuple(self._token(i) for i in range(prompt))
        draw = Draw(SamplingParams(temperature=0.0), tokens, 1, frozenset(), 0)
        self._core.add(NewSequence(name, tokens, draw, salt="", priority=0, arrival_ns=self._last_id))
        return name

    def _token(self, position: int) -> int:
        return position % self._core.info.vocab_size

    def _read_prompts(self) -> None:
        reading = set(self._drafts)
        while reading:
            for name, step in self._core.step(dict.fromkeys(reading, ())).items():
                if isinstance(step.outcome, GalleyError):
                    raise step.outcome
                if step.outcome is not None:
                    reading.remove(name)

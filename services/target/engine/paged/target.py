"""A target over the paged engine: the scheduler decides on blocks of the engine's KV pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from galley.core.cost.model import StepTimes
from galley.core.kv.table import KvTable
from galley.core.step import StepOutcome, StepPlan, StepTrace
from services.target.engine.protocol import EngineInfo, Limits, TargetEngine


class StepEngine(Protocol):
    """An engine that computes steps as planned, over numbered KV blocks; called from one thread."""

    @property
    def info(self) -> EngineInfo:
        """Return facts that never change."""

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> Sequence[StepOutcome]:
        """Return the outcome of each chunk, in order. A `watch` gets the times.

        Raise if the whole step failed; the KV that its chunks were to write is then undefined.
        """


class PagedTarget(TargetEngine):
    def __init__(
        self,
        engine: StepEngine,
        times: StepTimes,
        limits: Limits,
        mask_wait_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        """Run steps on `engine`; `mask_wait_ns` tells for how long they have waited for masks so far."""
        info = engine.info
        kv = KvTable(info.kv_blocks, info.kv_block_tokens, limits.max_sessions)
        super().__init__(kv, info, times, limits, max_itl_ns=round(limits.max_itl_ms * 1e6))
        self.takes_trees = info.trees
        self.feature_size = info.feature_size
        self._engine = engine
        self._mask_wait_ns = mask_wait_ns

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> Sequence[StepOutcome]:
        outcomes = self._engine.run(plan, watch)
        self.counts.mask_wait_ns = self._mask_wait_ns()
        return outcomes

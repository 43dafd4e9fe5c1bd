"""The row-cost curve that is measured at start."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from galley.core.step import StepOutcome, StepPlan, StepTrace
from services.target.engine.measurement import ROWS
from services.target.engine.paged.engine import PagedEngine
from services.target.engine.paged.measurement import measure
from services.target.engine.protocol import EngineInfo

if TYPE_CHECKING:
    from galley.engine.model import CausalModel

MS = 1_000_000


class Timed:
    def __init__(self, info: EngineInfo, row_ms: float) -> None:
        self.info = info
        self.now = 0
        self.rows: list[int] = []
        self._row_ms = row_ms

    def run(self, plan: StepPlan, watch: StepTrace | None = None) -> list[StepOutcome]:
        noise = 1000 * MS if not self.rows else 5 * MS if self.rows[-1] != plan.rows else 0
        self.now += round((10 + self._row_ms * plan.rows) * MS) + noise
        self.rows.append(plan.rows)
        for chunk in plan.chunks:
            assert chunk.want_logits == len(chunk.tokens)
            assert chunk.draw is not None
            assert len(chunk.draw.draft_tokens) == chunk.want_logits - 1
            assert len(chunk.blocks) * self.info.kv_block_tokens >= chunk.start + len(chunk.tokens)
        return [None] * len(plan.chunks)


def info_of(loaded: CausalModel, kv_blocks: int) -> EngineInfo:
    return replace(PagedEngine(loaded, "f00d").info, context_window=4096, kv_blocks=kv_blocks)


def test_the_best_of_three_is_the_cost(loaded: CausalModel) -> None:
    engine = Timed(info_of(loaded, 1000), row_ms=0.1)
    times = measure(engine, lambda: engine.now)
    assert times.points == tuple((rows, round((10 + 0.1 * rows) * MS)) for rows in ROWS)
    assert times(320) > times(256)


def test_it_ends_in_time_on_a_slow_machine(loaded: CausalModel) -> None:
    engine = Timed(info_of(loaded, 1000), row_ms=30)
    times = measure(engine, lambda: engine.now)
    assert len(times.points) >= 5
    assert engine.now < 15_000 * MS


def test_a_small_pool_is_enough(loaded: CausalModel) -> None:
    for blocks in (1, 5, 12):
        engine = Timed(info_of(loaded, blocks), row_ms=0.1)
        assert measure(engine, lambda engine=engine: engine.now).points[0][0] == 1  # type: ignore[misc]  # bound now


def test_it_measures_the_real_engine(loaded: CausalModel) -> None:
    times = measure(PagedEngine(loaded, "f00d"))
    costs = [ns for _, ns in times.points]
    assert len(costs) > 3
    assert all(cost > 0 for cost in costs)
    assert costs == sorted(costs)

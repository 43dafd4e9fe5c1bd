"""The fuzzed world over block table and engine: a fresh run is the sequence in one chunk on another pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from galley.core.content import SessionKey
from galley.core.kv.table import KvTable
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.scheduler import Scheduler
from galley.core.step import Draw, Sampled, StepChunk, StepOutcome, StepPlan
from galley.engine.model import CausalModel
from services.target.engine.paged.engine import PagedEngine
from tests.fakes.fuzz_world import TICK_NS, TIMES, FuzzSize, FuzzWorld
from tests.fakes.kv_check import check_table, drop
from tests.fakes.tiny_model import CONTEXT, POISON, STOP, VOCAB, poison, random_llama, save

SMALL = FuzzSize(
    vocab=VOCAB,
    context=CONTEXT,
    blocks=14,
    sessions=8,
    prompt_tokens=70,
    max_rows=48,
    stop=STOP,
    poison=POISON,
)


class PagedWorld(FuzzWorld):
    feature_layers = ((), (1, 2), (2,))

    def __init__(self, model: CausalModel, fresh: CausalModel, size: FuzzSize, seed: int) -> None:
        self._model, self._fresh = model, fresh
        self._table = KvTable(size.blocks, model.kv.block_tokens, 2 * size.sessions)
        scheduler = Scheduler(self._table, TIMES, max_rows=size.max_rows, max_linger_ns=TICK_NS)
        scheduler.takes_trees = True
        scheduler.feature_size = model.info.hidden_size
        super().__init__(scheduler, size, seed)

    def check(self) -> None:
        check_table(self._table)

    def check_empty(self, keys: Sequence[SessionKey]) -> None:
        for key in keys:
            drop(self._table, key)
        self.check()

    def run(self, plan: StepPlan) -> Sequence[StepOutcome]:
        self.counts.happened["copied blocks"] += len(plan.copies)
        self.counts.happened["moved tokens"] += len(plan.moves)
        self.counts.happened["trees"] += sum(bool(chunk.parents) for chunk in plan.chunks)
        return _run(self._model, plan)

    def fresh(self, draw: Draw) -> StepOutcome:
        tokens = [*draw.history, *draw.draft_tokens]
        blocks = range(-(-len(tokens) // self._fresh.kv.block_tokens))
        chunk = StepChunk(0, tokens, blocks, 1 + len(draw.draft_tokens), draw)
        return _run(self._fresh, StepPlan((chunk,)))[0]

    def fresh_states(self, tokens: Sequence[int], layers: tuple[int, ...]) -> bytes:
        blocks = range(-(-len(tokens) // self._fresh.kv.block_tokens))
        draw = Draw(SamplingParams(0.0), tokens, len(tokens), frozenset(), 0)
        chunk = StepChunk(0, tokens, blocks, 1, draw, feature_layers=layers, feature_rows=len(tokens))
        (outcome,) = _run(self._fresh, StepPlan((chunk,)))
        assert isinstance(outcome, Sampled)
        return outcome.states


def _run(model: CausalModel, plan: StepPlan) -> list[StepOutcome]:
    return PagedEngine(model, "fuzz").run(plan)


def save_small_model(directory: Path) -> Path:
    model = random_llama(hidden_size=64, spread=0.3, seed=0)
    poison(model)
    return save(model, directory)


def load_pair(
    directory: Path, size: FuzzSize, dtype: torch.dtype = torch.float32
) -> tuple[CausalModel, CausalModel]:
    def load(blocks: int) -> CausalModel:
        return CausalModel.load(directory, dtype=dtype, device="cpu", threads=1, kv_blocks=blocks)

    return load(size.blocks), load(-(-size.context // 32) + 1)

"""A target over vLLM under a random schedule, with few KV blocks: every token is that of a fresh pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from galley.core.content import SessionKey, block_hashes
from galley.core.step import Draw, StepOutcome, StepPlan
from services.target.engine.protocol import Limits
from services.target.engine.vllm.target import VllmEngine, VllmTarget
from tests.fakes.core_runs import Reference
from tests.fakes.fuzz_world import TIMES, FuzzSize, FuzzWorld
from tests.fakes.scheduler_world import request, result_of
from tests.fakes.tiny_model import CONTEXT, POISON, STOP
from tests.fakes.vllm_world import forget_all
from tests.integration.services.target.vllm.conftest import BLOCK_TOKENS, MARKS, started_core

if TYPE_CHECKING:
    from services.target.engine.vllm.core import VllmCore

pytestmark = MARKS

BLOCKS = 10
STEPS = 200
SIZE = FuzzSize(
    vocab=POISON, context=CONTEXT, blocks=BLOCKS, sessions=8, prompt_tokens=70, max_rows=24, stop=STOP
)
_LIMITS = Limits(max_sessions=6, max_waiting=12, max_rows=SIZE.max_rows)


@pytest.fixture(scope="module")
def few_blocks(poisoned_dir: Path) -> Iterator[VllmCore]:
    with started_core(
        poisoned_dir, num_gpu_blocks_override=BLOCKS + 1, max_num_batched_tokens=24, max_num_seqs=6
    ) as made:
        yield made


class CoreWorld(FuzzWorld):
    cuts_drafts = True

    def __init__(self, core: VllmCore, reference: Reference, seed: int) -> None:
        self.core = core
        self.target = VllmTarget(core, TIMES, _LIMITS)
        self._reference = reference
        super().__init__(self.target, SIZE, seed)

    def check(self) -> None:
        kv = self.target.kv
        assert kv.live_blocks + kv.free == kv.total == BLOCKS
        assert 0 <= kv.empty <= kv.total
        assert len(self.core._requests) <= self.core.max_sequences

    def check_empty(self, keys: Sequence[SessionKey]) -> None:  # all sessions are dropped
        forget_all(self.target, self._now)
        assert len(self.core._requests) == 1
        assert self.core.facts().used_blocks == 1

    def run(self, plan: StepPlan) -> Sequence[StepOutcome]:
        return self.target.run(plan)

    def fed_rows(self, plan: StepPlan) -> int:
        return sum(self.core._scheduler.scheduled.values())

    def fresh(self, draw: Draw) -> StepOutcome:
        return self._reference.outcome(draw)


@pytest.fixture
def emptied(few_blocks: VllmCore) -> Iterator[VllmCore]:
    yield few_blocks
    few_blocks.end(list(few_blocks._requests))
    few_blocks.reset_prefix_cache()
    few_blocks.facts()


@pytest.mark.parametrize("seed", [1, 2])
def test_every_response_of_a_random_schedule_is_the_models_own(
    emptied: VllmCore, reference: Reference, seed: int
) -> None:
    world = CoreWorld(emptied, reference, seed)
    world.play(STEPS)
    counts = world.counts
    assert counts.tokens_checked > STEPS / 2
    assert counts.accepted > 0
    assert world.target.counts.reused_tokens > 0
    assert world.target.counts.preempted > 0
    for what in ("Miss", "Superseded", "cancelled", "extended", "Confirmed"):
        assert counts.happened[what] > 0, counts


def test_steps_are_measured_and_prefixes_are_named_as_gateways_do(emptied: VllmCore) -> None:
    engine = VllmEngine(emptied)
    times = engine.measure()
    assert [rows for rows, _ in times.points][:2] == [1, 2]
    assert not emptied._requests
    target = engine.serve(times, _LIMITS)
    prompt = [5 + token % 90 for token in range(2 * BLOCK_TOKENS + 3)]
    for name, reused in (("first", 0), ("second", 2 * BLOCK_TOKENS)):
        target.submit(request(prompt, session=name, salt=b"tenant"), 0)
        answers = []
        while isinstance(plan := target.plan(0), StepPlan):
            target.conclude(plan, target.run(plan), 1)
            answers += target.take_responses()
        (answer,) = answers
        assert result_of(answer).kv_reused == reused
    named = target.kv.cached_prefixes(99)
    assert set(named[:2]) == set(block_hashes(b"tenant", prompt, BLOCK_TOKENS))

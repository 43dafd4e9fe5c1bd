"""vLLM's core over two ranks, processes that vLLM starts, which exchange by gloo."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from galley.core.sampling_params import SamplingParams
from services.target.engine.vllm.protocol import CoreLost
from tests.fakes.core_runs import PROPOSALS, Reference, continue_all, sequence_of
from tests.fakes.tiny_model import POISON
from tests.integration.services.target.vllm.conftest import MARKS, started_core

if TYPE_CHECKING:
    from services.target.engine.vllm.core import VllmCore

pytestmark = [*MARKS, pytest.mark.proof]


@pytest.fixture(scope="module")
def sharded(poisoned_dir: Path) -> Iterator[VllmCore]:
    with started_core(poisoned_dir, tensor_parallel_size=2) as made:
        yield made


def test_two_ranks_draw_the_tokens_of_one(sharded: VllmCore, reference: Reference) -> None:
    assert sharded.info.ranks == 2
    params = SamplingParams(temperature=0.8, seed=11, repetition_penalty=1.2)
    sequences = [
        sequence_of(str(i), [(i + 3 * token) % POISON for token in range(6 + i)], params, logprobs=2)
        for i in range(4)
    ]
    truths = {one.id: reference.continue_(one.draw, 24).tokens for one in sequences}
    for arm in ("no", "right", "spoiled"):
        made = continue_all(sharded, sequences, 24, PROPOSALS[arm], truths)
        assert {name: run.tokens for name, run in made.items()} == truths, arm


def test_a_killed_rank_ends_the_core_while_it_is_idle(sharded: VllmCore) -> None:
    """Run last: the core cannot go on."""
    lost = threading.Event()
    sharded.on_loss = lost.set
    os.kill(sharded.rank_pids[1], signal.SIGKILL)
    assert lost.wait(240)
    sharded.add(sequence_of("a", [1, 2, 3]))
    with pytest.raises(CoreLost):
        sharded.step({"a": ()})

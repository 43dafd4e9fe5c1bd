"""The short form of `make prove-vllm`: random schedules over a stub of vLLM's engine core."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.fakes.vllm_world import run_schedule

_SEEDS = 50


@pytest.mark.parametrize("first", range(0, 200, _SEEDS))
def test_every_response_of_a_random_schedule_is_the_models_own(first: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + _SEEDS):
        world = run_schedule(seed)
        happened += world.happened()
    for what in (
        "Confirmed",
        "Miss",
        "Superseded",
        "Overloaded",
        "Broken",
        "DeadlinePassed",
        "cancelled",
        "extended",
        "failed passes",
        "accepted",
        "preempted by vLLM",
        "reused tokens",
        "evicted blocks",
    ):
        assert happened[what] > 0, (what, happened)

"""vLLM's core with few KV blocks: who loses them, and that every sequence still gets its tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from galley.core.sampling_params import SamplingParams
from galley.core.step import Sampled
from tests.fakes.core_runs import Reference, continue_all, right_tokens, sequence_of, spoiled_tokens
from tests.fakes.tiny_model import POISON
from tests.integration.services.target.vllm.conftest import BLOCK_TOKENS, MARKS, started_core

if TYPE_CHECKING:
    from services.target.engine.vllm.core import VllmCore

pytestmark = MARKS

BLOCKS = 8


@pytest.fixture(scope="module")
def small(poisoned_dir: Path) -> Iterator[VllmCore]:
    """Yield a core with 8 usable blocks, which divides prompts of more than 24 tokens."""
    with started_core(
        poisoned_dir, num_gpu_blocks_override=BLOCKS + 1, max_num_batched_tokens=24, max_num_seqs=8
    ) as made:
        yield made


def prompt(length: int, start: int) -> list[int]:
    return [(start + 5 * token) % POISON for token in range(length)]


def test_the_blocks_are_those_that_sequences_can_hold(small: VllmCore) -> None:
    assert small.info.kv_blocks == BLOCKS
    assert small.info.kv_block_tokens == BLOCK_TOKENS
    assert small.info.context_window <= BLOCKS * BLOCK_TOKENS


def test_preempted_sequences_get_the_same_tokens(small: VllmCore, reference: Reference) -> None:
    """Four sequences of up to four blocks each share eight; penalties read a worker's own record."""
    penalized = SamplingParams(0.9, seed=5, repetition_penalty=1.3, frequency_penalty=0.4)
    sequences = [replace(sequence_of(str(i), prompt(50 + i, i), penalized), arrival_ns=i) for i in range(4)]
    truths = {one.id: reference.continue_(one.draw, 70).tokens for one in sequences}
    made = continue_all(small, sequences, 70, spoiled_tokens, truths)
    assert {name: run.tokens for name, run in made.items()} == truths
    fell = [name for name, run in made.items() if _has_fallen([step.computed for step in run.steps])]
    assert fell
    assert "0" not in fell  # the oldest keeps its blocks
    assert small.facts().used_blocks == 0


def _has_fallen(computed: list[int]) -> bool:
    return any(after < before for before, after in pairwise(computed))


def test_blocks_that_held_nan_harm_nobody_who_gets_them(small: VllmCore, reference: Reference) -> None:
    sequences = [sequence_of(str(i), prompt(34, i)) for i in range(4)]
    truths = {one.id: reference.continue_(one.draw, 12).tokens for one in sequences}
    bad = [sequence_of(f"bad-{i}", [i, POISON, *prompt(60, i)]) for i in range(4)]
    assert all(run.draws == 0 for run in continue_all(small, bad, 1).values())
    poisoned = {name: [POISON] * 12 for name in truths}
    for arm in (truths, poisoned, truths):
        made = continue_all(small, sequences, 12, right_tokens, arm)
        assert {name: run.tokens for name, run in made.items()} == truths


def test_a_long_prompt_delays_no_token_of_another(small: VllmCore) -> None:
    first = replace(sequence_of("first", prompt(5, 1)), arrival_ns=2)
    long = replace(sequence_of("long", prompt(120, 2)), arrival_ns=1)
    small.add(first)
    small.step({"first": ()})
    small.add(long)
    made = [small.step({"first": (), "long": ()}) for _ in range(3)]
    assert all(isinstance(step["first"].outcome, Sampled) for step in made)
    assert [step["long"].computed for step in made] == [23, 46, 69]
    small.end(["first", "long"])


def test_paused_sequences_lose_their_blocks_first_and_go_on(small: VllmCore, reference: Reference) -> None:
    idle = [replace(sequence_of(f"idle-{i}", prompt(40, i)), arrival_ns=i) for i in range(3)]
    truths = {one.id: reference.continue_(one.draw, 8).tokens for one in idle}
    drawn: dict[str, list[int]] = {one.id: [] for one in idle}
    for one in idle:
        small.add(one)
        while not drawn[one.id]:
            outcome = small.step({one.id: ()})[one.id].outcome
            drawn[one.id] += outcome.tokens if isinstance(outcome, Sampled) else ()
    assert small.facts().used_blocks == 6

    young = replace(sequence_of("young", prompt(3 * BLOCK_TOKENS + 1, 9)), arrival_ns=99)
    truth = reference.continue_(young.draw, 4).tokens
    made = continue_all(small, [young], 4)
    assert made["young"].tokens == truth
    assert small.facts().used_blocks == 4  # of two idle ones

    while any(len(tokens) < 8 for tokens in drawn.values()):
        for name, step in small.step(dict.fromkeys(drawn, ())).items():
            drawn[name] += step.outcome.tokens if isinstance(step.outcome, Sampled) else ()
    assert {name: tokens[:8] for name, tokens in drawn.items()} == truths
    small.end(drawn)


@pytest.mark.parametrize("place", ["priority", "arrival_ns"])
def test_the_oldest_gets_on_though_younger_ones_hold_all_blocks(small: VllmCore, place: str) -> None:
    young = [replace(sequence_of(f"young-{i}", prompt(60, i)), arrival_ns=10 + i) for i in range(4)]
    for one in young:
        small.add(one)
    while small.facts().used_blocks < BLOCKS:
        small.step({one.id: () for one in young})
    old = sequence_of("old", prompt(100, 7))
    old = replace(old, arrival_ns=1) if place == "arrival_ns" else replace(old, priority=1, arrival_ns=50)
    small.add(old)
    named = [one.id for one in young] + ["old"]
    steps = (small.step(dict.fromkeys(named, ()))["old"] for _ in range(12))
    assert any(isinstance(step.outcome, Sampled) for step in steps)
    small.end(named)
    assert small.facts().used_blocks == 0


def test_dropped_blocks_are_reported(small: VllmCore) -> None:
    from services.target.engine.vllm.protocol import DroppedBlocks, StoredBlocks  # noqa: PLC0415

    small.facts()
    for i in range(3):
        continue_all(small, [sequence_of(f"full-{i}", prompt(4 * BLOCK_TOKENS, i))], 1)
    events = small.facts().events
    stored = [event for event in events if isinstance(event, StoredBlocks)]
    first = next(event for event in stored if event.salt == "full-2")
    assert list(first.tokens[:BLOCK_TOKENS]) == prompt(BLOCK_TOKENS, 2)
    assert any(isinstance(event, DroppedBlocks) for event in events)

"""The scheduler under random requests and little KV: the same tokens, and every request completes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from galley.core.cost.model import StepTimes
from tests.fakes.scheduler_world import FLAT, MS, RISING, STEEP, Bench, Gateway, Load
from tests.fakes.truth import IDS
from tests.fakes.vllm_world import VllmBench

# Over blocks of the scheduler's own, and over a stub of vLLM's engine core.
BENCHES = [Bench, VllmBench]
SEEDS = st.integers(0, 2**32 - 1)
# Layers after which sessions want states.
WANTED = [(), (2, 5, 8), (1,)]


def load(seed: int, bench: Bench, sessions: int, longest: int) -> Load:
    rng = random.Random(seed)
    stem = [rng.randrange(IDS) for _ in range(longest)]
    gateways = []
    for i, arrival in enumerate(rng.sample(range(100), sessions)):
        prompt = stem[: rng.randint(1, longest)] if rng.random() < 0.5 else []
        if not prompt or rng.random() < 0.5:
            prompt = [*prompt, *(rng.randrange(IDS) for _ in range(rng.randint(1, longest)))][:longest]
        elif rng.random() < 0.5:
            prompt = stem
        layers = WANTED[i % len(WANTED)] if bench.scheduler.feature_size else ()
        gateways.append(Gateway(bench, f"s{i}", prompt, rng.randint(1, 20), arrival, layers))
    return Load(bench, gateways, seed)


@pytest.mark.parametrize("bench_of", BENCHES)
@settings(max_examples=40)
@given(seed=SEEDS, times=st.sampled_from([FLAT, STEEP]), linger=st.sampled_from([0, 50 * MS]))
def test_tokens_are_the_same_for_any_schedule(
    bench_of: type[Bench], seed: int, times: StepTimes, linger: int
) -> None:
    bench = bench_of(times=times, max_rows=16, max_linger_ns=linger)
    load(seed, bench, sessions=6, longest=30).run(faults=True)


@settings(max_examples=40)
@given(seed=SEEDS, times=st.sampled_from([FLAT, STEEP, RISING]), itl=st.sampled_from([1, 20 * MS]))
def test_tokens_are_the_same_if_prompts_are_read_in_parts(seed: int, times: StepTimes, itl: int) -> None:
    bench = Bench(times=times, max_rows=16, max_itl_ns=itl)
    load(seed, bench, sessions=6, longest=30).run(faults=True)


@settings(max_examples=40)
@given(seed=SEEDS, linger=st.sampled_from([0, 50 * MS]))
def test_tokens_are_the_same_if_the_engine_divides_prompts_and_preempts(seed: int, linger: int) -> None:
    bench = Bench(blocks=256, max_rows=16, max_linger_ns=linger, divides=random.Random(seed))
    load(seed, bench, sessions=6, longest=30).run(faults=True)


@pytest.mark.parametrize("bench_of", BENCHES)
@settings(max_examples=40)
@given(seed=SEEDS, blocks=st.integers(12, 20))
def test_all_complete_in_a_pool_that_holds_one_of_them(bench_of: type[Bench], seed: int, blocks: int) -> None:
    # 40 prompt and 20 output tokens need up to 15 blocks of 4, and one more if a shared block is copied.
    bench = bench_of(blocks=max(blocks, 16), max_rows=16)
    load(seed, bench, sessions=6, longest=40).run(faults=True)


@pytest.mark.parametrize("bench_of", BENCHES)
@pytest.mark.parametrize("seed", range(5))
def test_all_complete_with_fewer_slots_than_sessions(bench_of: type[Bench], seed: int) -> None:
    load(seed, bench_of(max_sessions=2, max_waiting=4), sessions=6, longest=12).run(faults=True)

"""Tests of the prompts and the figures of the demonstration of learning drafts."""

from __future__ import annotations

from itertools import islice

import pytest

from bench.living.traffic import Sample, Traffic, figures_of
from bench.living.workloads import SPANISH, SQL, WORKLOADS, prompts
from galley.bench.answers import Rounds
from galley.bench.closed_loop import GatewayLoop
from galley.client.client import AsyncClient


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_seed_gives_the_same_prompts_and_another_seed_others(workload: str) -> None:
    first, again, other = (
        [prompt.text for prompt in islice(prompts(workload, seed), 200)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert len(set(first)) > 100


def test_prompts_name_their_workload() -> None:
    assert {prompt.label for prompt in islice(prompts(SQL, 1), 5)} == {SQL}


def test_figures_are_of_all_rounds_together() -> None:
    rounds = Rounds(rounds=10, accepted=6, accepted_at=(3, 2, 1), verified_at=(4, 3, 2))
    samples = [Sample(1.0, SQL, 10, 2.0, rounds), Sample(2.0, SQL, 20, 1.0, Rounds(rounds=20))]
    found = figures_of(samples)
    assert (found.answers, found.tokens) == (2, 30)
    assert found.first == pytest.approx(3 / 4)
    assert found.drafted_share == pytest.approx(6 / 30)
    assert found.tokens_per_s == pytest.approx(10)


def test_no_answer_has_figures_of_zero() -> None:
    assert figures_of([]).tokens_per_s == 0.0


async def test_windows_hold_the_answers_that_ended_in_them() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        traffic = Traffic(GatewayLoop(client), WORKLOADS, seed=1, max_tokens=8)
    traffic.samples += [Sample(at_s, SQL, 5, 1.0, Rounds()) for at_s in (1.0, 61.0, 62.0, 121.0)]
    windows = traffic.windows(60.0)
    assert [at_s for at_s, _ in windows] == [60.0, 120.0]
    assert [of[SQL].answers for _, of in windows] == [1, 2]
    assert windows[0][1][SPANISH].answers == 0

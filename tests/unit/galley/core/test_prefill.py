"""How long the steps are that read a prompt beside streams, by the costs of a step on two cores."""

from __future__ import annotations

import pytest

from galley.core.cost.model import StepTimes
from galley.core.scheduler.prefill import PrefillBudget
from tests.fakes.scheduler_world import MS, Bench, request
from tests.fakes.truth import IDS

ITL_NS = 100 * MS
# Measured on one thread: SmolLM2-135M in bfloat16.
TIMES = StepTimes.measured(
    [(1, 23 * MS), (4, 25 * MS), (8, 38 * MS), (16, 55 * MS), (32, 96 * MS), (256, 640 * MS)]
)
PROMPT = [i * i % IDS for i in range(1500)]


def bench_of(streams: int, max_itl_ns: int = ITL_NS, times: StepTimes = TIMES) -> Bench:
    """Return a bench whose streams decode, one token a step."""
    bench = Bench(times=times, max_rows=256, blocks=2000, max_sessions=70, max_itl_ns=max_itl_ns)
    for i in range(streams):
        bench.submit(request([i % IDS, 2], session=f"s{i}", credit=900, arrival_ns=1))
    if streams:
        bench.step()
    return bench


def read_prompt(bench: Bench) -> list[tuple[int, int]]:
    """Return the prompt's rows of each step that read it, and how long the step took."""
    item = bench.submit(request(PROMPT, session="long", arrival_ns=9))
    steps: list[tuple[int, int]] = []
    while True:
        plan, began = bench.begin(), bench.now
        answers = bench.finish(plan)
        steps.append((len(plan.chunks[-1].tokens), bench.now - began))
        if item in {answer.request_id for answer in answers}:
            return steps


@pytest.mark.parametrize("streams", [1, 8, 16])
def test_streams_wait_no_longer_than_the_bound_while_a_prompt_is_read(streams: int) -> None:
    steps = read_prompt(bench_of(streams))
    assert max(took for _, took in steps) <= ITL_NS
    assert sum(rows for rows, _ in steps) == len(PROMPT)
    # Less would waste the time that the streams can wait.
    assert all(took > 0.9 * ITL_NS for _, took in steps[:-1])


def test_without_a_bound_a_step_is_as_long_as_its_rows() -> None:
    assert max(took for _, took in read_prompt(bench_of(8, max_itl_ns=0))) == TIMES(256)


def test_a_prompt_without_streams_beside_it_has_all_rows() -> None:
    assert [rows for rows, _ in read_prompt(bench_of(0))] == [256] * 5 + [220]


def test_a_prompt_has_a_third_of_the_time_if_streams_alone_exceed_the_bound() -> None:
    others_ns = TIMES(64)
    assert others_ns > ITL_NS
    for _, took in read_prompt(bench_of(64))[:-1]:
        assert 0.3 < (took - others_ns) / took <= 1 / 3


def test_a_prompt_has_a_few_rows_however_dear_they_are() -> None:
    steep = StepTimes.measured([(1, 90 * MS), (2, 180 * MS)])
    assert {rows for rows, _ in read_prompt(bench_of(1, times=steep))[:-1]} == {8}


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_what_prompt_rows_cost_is_learnt_from_their_steps(share: float) -> None:
    bench = bench_of(8)
    others_ns = TIMES(8)
    bench.times = StepTimes.measured(
        [(rows, round(others_ns + share * max(0, ns - others_ns))) for rows, ns in TIMES.points]
    )
    settled = [took for _, took in read_prompt(bench)[8:-1]]
    assert settled
    for took in settled:
        assert took == pytest.approx(ITL_NS, rel=0.1)


def test_where_rows_cost_nothing_a_step_teaches_nothing() -> None:
    budget = PrefillBudget(ITL_NS, lambda rows, _: 5 * MS if rows <= 100 else rows * MS)
    before = budget.rows(256, 2, 0)
    budget.record(3, 2, 0, 80 * MS)
    assert budget.rows(256, 2, 0) == before

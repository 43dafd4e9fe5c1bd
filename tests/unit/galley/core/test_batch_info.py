"""The description of a step in progress."""

from __future__ import annotations

import pytest

from galley.core.content import Miss
from galley.core.errors import Broken
from galley.core.scheduler.messages import BatchInfo
from tests.fakes.scheduler_world import Bench, request

PROMPT = [3, 5, 7, 11]


def prompt(count: int, seed: int) -> list[int]:
    return [(7 * i + 13 * seed) % 97 for i in range(count)]


def facts_of(bench: Bench) -> BatchInfo:
    return bench.scheduler.current_batch


def test_batch_info_counts_rows_by_purpose() -> None:
    bench = Bench(blocks=64, block_tokens=4)
    drafting = bench.submit(request(PROMPT, session="drafting", arrival_ns=1, draft_tokens=(1, 2)))
    feeding = bench.submit(request(prompt(80, 1), session="feeding", arrival_ns=2))
    bench.begin()
    # Of 64 rows: a prompt of 4 with 2 draft tokens, and a part of another prompt.
    assert bench.scheduler.current_batch == BatchInfo(
        request_ids=(drafting, feeding),
        rows=64,
        draft_rows=2,
        prefill_rows=3 + 58,
        free_blocks=64 - 2 - 15,
        queue_depth=2,
        preempted=(),
        evicted=(),
    )


def test_batch_info_without_a_step_raises() -> None:
    with pytest.raises(Broken):
        _ = Bench().scheduler.current_batch


def test_a_preempted_session_is_named_once() -> None:
    bench = Bench(max_sessions=1)
    young = bench.submit(request(prompt(9, 1), session="young", arrival_ns=9, credit=50))
    bench.step()
    old = bench.submit(request(PROMPT, session="old", arrival_ns=1, credit=1))
    plan = bench.begin()
    assert facts_of(bench).preempted == ("young",)
    answers = {answer.request_id: answer for answer in bench.finish(plan)}
    assert isinstance(answers[young].outcome, Miss)
    assert answers[young].preempted
    assert not answers[old].preempted
    bench.begin()
    assert facts_of(bench).preempted == ()


def test_taking_blocks_within_a_step_is_a_preemption() -> None:
    bench = Bench(blocks=6, block_tokens=4)
    young = bench.submit(request(prompt(12, 1), session="young", arrival_ns=9, credit=50))
    bench.step()
    bench.submit(request(prompt(20, 2), session="old", arrival_ns=1))
    plan = bench.begin()
    assert bench.scheduler.current_batch.preempted == ("young",)
    [lost] = [answer for answer in bench.finish(plan) if answer.request_id == young and answer.preempted]
    assert isinstance(lost.outcome, Miss)


def test_a_miss_of_an_uncached_prefix_is_no_preemption() -> None:
    bench = Bench()
    bench.submit(request(PROMPT, start=2))
    [missed] = bench.scheduler.take_responses()
    assert isinstance(missed.outcome, Miss)
    assert not missed.preempted


def test_an_idle_session_that_makes_room_is_evicted() -> None:
    bench = Bench(blocks=6, block_tokens=4)
    bench.submit(request(prompt(12, 1), session="idle", arrival_ns=1))
    bench.step()
    bench.submit(request(prompt(20, 2), session="new", arrival_ns=2))
    bench.begin()
    assert bench.scheduler.current_batch.evicted == ("idle",)
    assert bench.scheduler.current_batch.preempted == ()

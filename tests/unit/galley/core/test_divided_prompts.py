"""An engine that divides prompts over steps by itself, and takes KV away for others."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from galley.core.errors import Broken, DeadlinePassed, Overloaded
from galley.core.step import Computed, Sampled
from tests.fakes.kv_check import check_table
from tests.fakes.scheduler_world import MS, Bench, request, result_of, true_answer
from tests.fakes.truth import IDS

PROMPT = [(i * i) % IDS for i in range(40)]
ANSWER = true_answer(PROMPT, 20)


@pytest.fixture
def bench() -> Bench:
    return Bench(max_rows=16, divides=random.Random(1))


def test_every_prompt_is_granted_whole(bench: Bench) -> None:
    bench.submit(request(PROMPT, session="long", arrival_ns=1, draft_tokens=tuple(ANSWER[:3])))
    bench.submit(request(PROMPT[:30], session="other", arrival_ns=2))
    bench.submit(request(PROMPT[:2], session="short", arrival_ns=3, draft_tokens=tuple(ANSWER[:3])))
    plan = bench.begin()
    assert [len(chunk.tokens) for chunk in plan.chunks] == [40, 30, 2], "no draft beyond the row budget"
    assert [chunk.want_logits for chunk in plan.chunks] == [1, 1, 1]
    assert [chunk.key for chunk in plan.chunks] == [(b"", "long"), (b"", "other"), (b"", "short")]


@pytest.mark.parametrize(("prompt", "rows", "drawn"), [(2, 2, 1), (1, 4, 4)])
def test_drafts_are_verified_unless_a_prompt_is_read(
    bench: Bench, prompt: int, rows: int, drawn: int
) -> None:
    bench.submit(request(PROMPT[:prompt], draft_tokens=(1, 2, 3)))
    (chunk,) = bench.begin().chunks
    assert (len(chunk.tokens), chunk.want_logits) == (rows, drawn)


def test_tokens_that_the_engine_finds_cached_count_as_reused(bench: Bench) -> None:
    item = bench.submit(request(PROMPT[:9]))
    plan = bench.begin()
    bench.scheduler.record_fed(plan.chunks[0].key, 8, 0)
    bench.scheduler.conclude(plan, [Sampled((7,))], bench.now)
    (answer,) = bench.scheduler.take_responses()
    assert (answer.request_id, result_of(answer).kv_reused) == (item, 8)
    assert bench.scheduler.counts.reused_tokens == 8


def test_a_plan_refers_to_a_long_prompt_instead_of_copying_it() -> None:
    long = [i % IDS for i in range(100_000)]
    bench = Bench(blocks=64, block_tokens=4096, divides=random.Random(1))
    bench.submit(request(long, max_position=len(long) + 9))
    bench.scheduler.conclude(bench.begin(), [Computed(50_000)], bench.now)
    tracemalloc.start()
    try:
        (chunk,) = bench.begin().chunks
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 50_000, "a copy takes 8 bytes a token"
    assert (len(chunk.tokens), list(chunk.tokens)) == (50_000, long[50_000:])


def test_the_next_step_begins_where_the_engine_stopped(bench: Bench) -> None:
    bench.submit(request(PROMPT))
    bench.scheduler.conclude(bench.begin(), [Computed(25)], bench.now)
    assert bench.scheduler.take_responses() == []
    plan = bench.begin()
    assert [(chunk.start, len(chunk.tokens)) for chunk in plan.chunks] == [(25, 15)]
    bench.scheduler.conclude(plan, [Sampled((ANSWER[0],))], bench.now)
    (answer,) = bench.scheduler.take_responses()
    assert (result_of(answer).tokens, result_of(answer).kv_len) == ((ANSWER[0],), 40)
    check_table(bench.table)


def test_rows_count_as_fed_and_not_as_planned(bench: Bench) -> None:
    drawing = bench.submit(request(PROMPT[:1], session="drawing", arrival_ns=1))
    part = bench.submit(request(PROMPT, session="part", arrival_ns=2))
    bench.submit(request(PROMPT, session="waiting", arrival_ns=3))
    plan = bench.begin()
    assert bench.scheduler.current_batch.rows == 81
    bench.now += 10 * MS
    batch = bench.scheduler.conclude(plan, [Sampled((7,)), Computed(9), Computed(0)], bench.now)
    assert (batch.request_ids, batch.rows, batch.draft_rows, batch.prefill_rows) == (
        (drawing, part),
        10,
        0,
        9,
    )
    (answer,) = bench.scheduler.take_responses()
    assert (result_of(answer).batch_rows, result_of(answer).batch_sessions) == (10, 2)


def test_rows_that_the_engine_found_in_its_cache_are_not_fed(bench: Bench) -> None:
    item = bench.submit(request(PROMPT, session="cached"))
    plan = bench.begin()
    bench.scheduler.record_fed((b"", "cached"), 32, 0)
    batch = bench.scheduler.conclude(plan, [Sampled((ANSWER[0],))], bench.now)
    assert (batch.request_ids, batch.rows, batch.prefill_rows) == ((item,), 8, 7)
    (answer,) = bench.scheduler.take_responses()
    assert (result_of(answer).batch_rows, result_of(answer).kv_reused) == (8, 32)


def test_a_step_that_fed_nothing_teaches_nothing(bench: Bench) -> None:
    bench.submit(request(PROMPT))
    plan = bench.begin()
    bench.now += 10 * MS
    batch = bench.scheduler.conclude(plan, [Computed(0)], bench.now)
    assert (batch.request_ids, batch.rows, batch.prefill_rows) == ((), 0, 0)
    assert bench.scheduler.take_responses() == []


def test_a_request_waits_until_a_row_of_it_is_fed(bench: Bench) -> None:
    bench.submit(request(PROMPT))
    for outcome, queue_times_ns in ((Computed(0), []), (Computed(9), [13 * MS]), (Sampled((ANSWER[0],)), [])):
        bench.now += 3 * MS
        plan = bench.begin()
        bench.now += 7 * MS
        bench.scheduler.conclude(plan, [outcome], bench.now)
        assert bench.scheduler.queue_times_ns == queue_times_ns
    (answer,) = bench.scheduler.take_responses()
    assert (result_of(answer).queue_ns, result_of(answer).compute_ns) == (16 * MS, 14 * MS)


def test_a_request_that_was_cancelled_in_its_first_step_has_no_queue_time(bench: Bench) -> None:
    cancelled = bench.submit(request(PROMPT))
    plan = bench.begin()
    bench.scheduler.cancel(cancelled)
    bench.scheduler.conclude(plan, [Computed(9)], bench.now)
    assert bench.scheduler.queue_times_ns == []


def test_the_deadline_of_a_request_counts_until_a_row_of_it_is_fed(bench: Bench) -> None:
    bench.submit(request(PROMPT, session="fed", arrival_ns=1, deadline_ns=5))
    waits = bench.submit(request(PROMPT, session="waits", arrival_ns=2, deadline_ns=5))
    bench.scheduler.conclude(bench.begin(), [Computed(9), Computed(0)], bench.now)
    bench.scheduler.expire(5)
    (answer,) = bench.scheduler.take_responses()
    assert (answer.request_id, type(answer.outcome)) == (waits, DeadlinePassed)
    assert [chunk.key for chunk in bench.begin().chunks] == [(b"", "fed")]


def test_requests_of_which_no_row_was_fed_count_as_waiting() -> None:
    bench = Bench(max_waiting=2, divides=random.Random(1))
    for arrival_ns in (1, 2, 3):
        if arrival_ns == 3:  # the first has started by now
            bench.scheduler.conclude(bench.begin(), [Computed(9), Computed(0)], bench.now)
        bench.submit(request(PROMPT, session=f"s{arrival_ns}", arrival_ns=arrival_ns))
    with pytest.raises(Overloaded):
        bench.submit(request(PROMPT, session="s4", arrival_ns=4))
    assert bench.scheduler.take_responses() == []


def test_a_request_that_waits_within_a_step_makes_room_for_an_older_one() -> None:
    bench = Bench(max_waiting=1, divides=random.Random(1))
    young = bench.submit(request(PROMPT, session="young", arrival_ns=2))
    plan = bench.begin()
    bench.submit(request(PROMPT[::-1], session="old", arrival_ns=1))
    (answer,) = bench.scheduler.take_responses()
    assert (answer.request_id, type(answer.outcome)) == (young, Overloaded)
    bench.scheduler.conclude(plan, [Computed(25)], bench.now)
    plan = bench.begin()
    assert [chunk.key for chunk in plan.chunks] == [(b"", "old")]
    bench.scheduler.conclude(plan, [Computed(9)], bench.now)
    bench.submit(request(PROMPT, session="young", arrival_ns=2))
    assert [chunk.start for chunk in bench.begin().chunks] == [9, 25], "what was computed is kept"


def test_tokens_found_again_after_a_preemption_are_counted_once(bench: Bench) -> None:
    bench.submit(request(PROMPT, session="cached"))
    for found, outcome in ((32, Computed(36)), (None, Computed(0)), (32, Sampled((ANSWER[0],)))):
        plan = bench.begin()
        if found is not None:
            bench.scheduler.record_fed((b"", "cached"), found, 0)
        bench.scheduler.conclude(plan, [outcome], bench.now)
    (answer,) = bench.scheduler.take_responses()
    assert (result_of(answer).kv_reused, bench.scheduler.counts.reused_tokens) == (32, 32)


def test_a_session_whose_kv_was_taken_goes_on_without_a_miss(bench: Bench) -> None:
    bench.submit(request(PROMPT, session="taken", credit=1))
    plan = bench.begin()
    bench.scheduler.conclude(plan, [Sampled((ANSWER[0],))], bench.now)
    bench.scheduler.take_responses()
    bench.scheduler.conclude(bench.begin(), [Computed(0)], bench.now)
    assert bench.scheduler.take_responses() == []
    assert (bench.scheduler.counts.preempted, bench.scheduler.counts.missed) == (1, 0)
    plan = bench.begin()
    assert bench.scheduler.current_batch.preempted == ("taken",)
    assert [(chunk.start, list(chunk.tokens)) for chunk in plan.chunks] == [(0, [*PROMPT, ANSWER[0]])]
    bench.scheduler.conclude(plan, [Sampled((ANSWER[1],))], bench.now)
    (answer,) = bench.scheduler.take_responses()
    assert (result_of(answer).tokens, result_of(answer).kv_len) == ((ANSWER[1],), 41)
    check_table(bench.table)


def test_a_request_cancelled_meanwhile_leaves_the_computed_part(bench: Bench) -> None:
    item = bench.submit(request(PROMPT))
    plan = bench.begin()
    bench.scheduler.cancel(item)
    bench.scheduler.conclude(plan, [Computed(25)], bench.now)
    assert bench.table.live_blocks == 0
    bench.submit(request(PROMPT))
    assert [chunk.start for chunk in bench.begin().chunks] == [25]


@pytest.mark.parametrize("kv_len", [-1, len(PROMPT), len(PROMPT) + 1])
def test_an_impossible_length_ends_the_request(bench: Bench, kv_len: int) -> None:
    bench.submit(request(PROMPT))
    bench.scheduler.conclude(bench.begin(), [Computed(kv_len)], bench.now)
    (answer,) = bench.scheduler.take_responses()
    assert isinstance(answer.outcome, Broken)
    check_table(bench.table)

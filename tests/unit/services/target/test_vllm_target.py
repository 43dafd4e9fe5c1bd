"""A target over a stub of vLLM's engine core: sequences, prefix cache, faults and bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from galley.core.content import Miss, block_hashes
from galley.core.errors import Broken, GalleyError, Overloaded, ServerFault, Unavailable
from galley.core.hints import Hint
from galley.core.sampling_params import SamplingParams
from galley.core.scheduler.messages import Confirmed, Response, VerifyRequest
from services.target.engine.vllm.protocol import CoreLost
from tests.fakes.scheduler_world import request, result_of, true_answer
from tests.fakes.stepped_core import STUB_POISON, stub_outcome
from tests.fakes.vllm_world import VllmBench

PROMPT = [0, 2, 3, 1, 2, 4, 5, 6, 1, 3]
TRUE = true_answer(PROMPT, 12)
SALT = b"tenant"


@pytest.fixture
def bench() -> VllmBench:
    return VllmBench()


def answer(bench: VllmBench, message: VerifyRequest) -> list[Confirmed]:
    number = bench.submit(message)
    return bench.results()[number]


def fault(bench: VllmBench, message: VerifyRequest) -> GalleyError:
    number = bench.submit(message)
    responses = [one for one in bench.step() if one.request_id == number]
    assert isinstance(responses[-1].outcome, GalleyError)
    return responses[-1].outcome


def tokens_of(results: list[Confirmed]) -> list[int]:
    return [token for result in results for token in result.tokens]


def test_a_sequence_goes_on_over_the_requests_of_its_session(bench: VllmBench) -> None:
    first = answer(bench, request(PROMPT, credit=3))
    assert tokens_of(first) == TRUE[:4]
    known = [*PROMPT, *TRUE[:4]]
    (second,) = answer(bench, request(known, start=len(known) - 1, draft_tokens=tuple(TRUE[4:7])))
    assert second.tokens == tuple(TRUE[4:8])
    assert (second.accepted, second.verified, second.kv_reused) == (3, 3, len(known) - 1)
    assert bench.core.ids == {"1"}


def test_a_session_that_was_cut_gets_a_new_sequence_with_the_blocks_that_are_still_right(
    bench: VllmBench,
) -> None:
    answer(bench, request(PROMPT, credit=6))
    cut = [*PROMPT, *TRUE[:2]]
    (result,) = answer(bench, request(cut, start=4))
    assert result.tokens == (TRUE[2],)
    assert result.kv_reused == 8
    assert bench.core.ids == {"2"}


def test_a_sequence_that_has_drawn_more_than_its_outcome_is_replaced(bench: VllmBench) -> None:
    answer(bench, request(PROMPT))
    known = [*PROMPT, TRUE[0]]
    bench.core.cuts = True
    number = bench.submit(request(known, start=len(PROMPT), draft_tokens=tuple(TRUE[1:4]), credit=3))
    results = bench.results()[number]
    assert results[0].tokens == tuple(TRUE[1:4])
    assert tokens_of(results) == TRUE[1:8]
    assert bench.core.ids == {"2"}


@pytest.mark.parametrize(
    "changed",
    [
        {"sampling": SamplingParams(temperature=1.0, seed=5)},
        {"prompt_len": 2},
        {"stop_token_ids": frozenset({7})},
        {"min_tokens": 9},
        {"logprobs": 1},
        {"priority": 1},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_request_of_other_rules_gets_a_new_sequence(bench: VllmBench, changed: dict[str, Any]) -> None:
    answer(bench, request(PROMPT))
    known = [*PROMPT, TRUE[0]]
    answer(bench, request(known, start=len(PROMPT)))
    assert bench.core.ids == {"1"}
    known.append(TRUE[1])
    drafted = request(known, start=len(PROMPT), draft_tokens=tuple(TRUE[2:5]))
    (result,) = answer(bench, replace(drafted, **changed))
    assert bench.core.ids == {"2"}
    # It reads its prompt again, beside which vLLM verifies nothing; full blocks are cached.
    assert (result.verified, result.kv_reused) == (0, 8)


def test_cached_prefixes_are_found_by_sessions_of_the_same_tenant_only(bench: VllmBench) -> None:
    for name, salt, reused in (("a", SALT, 0), ("b", SALT, 8), ("c", b"other", 0)):
        (result,) = answer(bench, request(PROMPT, session=name, salt=salt))
        assert result.kv_reused == reused
    assert bench.target.counts.prompt_tokens == 3 * len(PROMPT)
    assert bench.target.counts.reused_tokens == 8


def test_vllm_gets_the_adapter_and_the_salt_of_a_request(bench: VllmBench) -> None:
    answer(bench, request(PROMPT, salt=SALT, lora="sql"))
    [sequence] = bench.core._sequences.values()
    assert (sequence.given.lora, bytes.fromhex(sequence.given.salt)) == ("sql", SALT)


def test_a_lease_names_cached_prefixes_as_gateways_do(bench: VllmBench) -> None:
    answer(bench, request(PROMPT, session="a", salt=SALT))
    answer(bench, request(PROMPT[::-1], session="b", salt=b"other"))
    answer(bench, request(PROMPT, session="c", salt=SALT))
    recent = block_hashes(SALT, PROMPT, 4)
    assert set(bench.target.kv.cached_prefixes(2)) == set(recent)
    assert set(bench.target.kv.cached_prefixes(99)) == {*recent, *block_hashes(b"other", PROMPT[::-1], 4)}


def test_a_session_that_vllm_has_preempted_is_no_cache_miss() -> None:
    bench = VllmBench(blocks=4)
    answer(bench, request(PROMPT, session="a"))
    answer(bench, request(PROMPT[::-1], session="b"))  # takes the blocks of the paused one
    known, drafts = [*PROMPT, TRUE[0]], tuple(TRUE[1:4])
    (result,) = answer(bench, request(known, start=len(PROMPT), session="a", draft_tokens=drafts))
    assert result.tokens == (TRUE[1],)
    assert bench.target.counts.missed == 0
    # All but one block is read again, and no draft token is verified beside it.
    assert (result.batch_rows, result.kv_reused) == (len(known) - 4, 4)
    assert (result.accepted, result.verified) == (0, 0)


def test_a_sequence_that_samples_otherwise_reads_its_tokens_again(bench: VllmBench) -> None:
    answer(bench, request(PROMPT))
    known, sampling = PROMPT, SamplingParams(temperature=0.5, seed=3)
    for i in range(3):
        known = [*known, TRUE[i]]
        message = request(known, start=8, sampling=replace(sampling, seed=i), draft_tokens=(1, 2))
        (result,) = answer(bench, message)
        cached = (len(known) - 1) // 4 * 4  # in whole blocks
        assert (result.verified, result.kv_reused, result.batch_rows) == (0, cached, len(known) - cached)
    counts = bench.target.counts
    assert (counts.prompt_tokens, counts.reused_tokens) == (len(PROMPT), 0)


def test_a_plan_that_never_runs_leaves_no_sequence_behind(bench: VllmBench) -> None:
    answer(bench, request(PROMPT))
    bench.submit(request([*PROMPT, TRUE[0]], start=8, min_tokens=5))
    bench.begin()  # it is to end the sequence
    bench.target.abandon(Unavailable("a fault before the step"))
    bench.target.take_responses()
    answer(bench, request(PROMPT[::-1], session="other"))
    assert len(bench.core.ids) == 1


def test_a_long_prompt_is_divided_over_steps_and_draws_once() -> None:
    bench = VllmBench(max_rows=4)
    item = bench.submit(request(PROMPT, draft_tokens=tuple(TRUE[:2])))
    steps = [bench.step() for _ in range(3)]
    assert steps[:2] == [[], []]
    (result,) = steps[2]
    assert result.request_id == item
    # vLLM verifies no draft tokens in the step that reads the prompt.
    assert (result_of(result).tokens, result_of(result).verified) == ((TRUE[0],), 0)


def test_a_step_verifies_at_most_what_the_core_and_the_request_allow() -> None:
    bench = VllmBench(max_draft_tokens=3)
    answer(bench, request(PROMPT))
    known, drafts = [*PROMPT, TRUE[0]], tuple(TRUE[1:9])
    (first,) = answer(bench, request(known, start=8, draft_tokens=drafts))
    assert first.tokens == tuple(TRUE[1:5])
    known = [*PROMPT, *TRUE[:5]]
    (second,) = answer(bench, request(known, start=8, draft_tokens=tuple(TRUE[5:9]), max_verified=2))
    assert second.tokens == tuple(TRUE[5:8])


def test_a_late_hint_is_verified_where_it_still_fits(bench: VllmBench) -> None:
    item = bench.submit(request(PROMPT, credit=8))
    assert [result_of(one).tokens for one in bench.step()] == [(TRUE[0],)]
    assert [result_of(one).tokens for one in bench.step()] == [(TRUE[1],)]
    late = Hint(len(PROMPT), request(PROMPT, start=len(PROMPT)).prefix_hash, tuple(TRUE[:6]))
    bench.extend(item, hint=late)
    (result,) = bench.step()
    assert result_of(result).tokens == tuple(TRUE[2:7])


def test_draft_tokens_that_memory_cannot_hold_are_not_verified() -> None:
    bench = VllmBench(blocks=3)
    answer(bench, request(PROMPT))
    bench.submit(request([*PROMPT, TRUE[0]], start=8, draft_tokens=tuple(TRUE[1:5])))
    (only,) = bench.step()
    assert (result_of(only).tokens, result_of(only).verified) == ((TRUE[1],), 0)


def test_a_request_that_memory_can_never_hold_is_refused() -> None:
    with pytest.raises(GalleyError, match=r"slice.tokens: must be at most the 8 tokens"):
        VllmBench(blocks=2).submit(request(PROMPT))


def test_the_longest_idle_session_is_evicted_for_a_new_one() -> None:
    bench = VllmBench(max_sessions=2)
    for name in ("a", "b"):
        answer(bench, request(PROMPT, session=name))
    bench.submit(request(PROMPT, session="c"))
    bench.begin()
    assert bench.target.current_batch.evicted == ("a",)
    bench = VllmBench(max_sessions=2)
    for name in ("a", "b", "c"):
        answer(bench, request(PROMPT, session=name))
    assert bench.core.ids == {"2", "3"}
    item = bench.submit(request([*PROMPT, TRUE[0]], start=4, session="a"))
    assert bench.scheduler.take_responses() == [Response(item, Miss(0, request([]).prefix_hash))]


def test_the_youngest_gives_its_slot_to_an_older_session() -> None:
    bench = VllmBench(max_sessions=1)
    young = bench.submit(request(PROMPT, session="young", credit=9, arrival_ns=2))
    bench.step()
    old = bench.submit(request(PROMPT, session="old", arrival_ns=1))
    plan = bench.begin()
    (preempted,) = bench.scheduler.take_responses()
    assert preempted.request_id == young
    assert preempted.preempted
    (done,) = bench.finish(plan)
    assert done.request_id == old
    youngest = bench.submit(request(PROMPT, session="youngest", arrival_ns=3))
    assert [one.request_id for one in bench.step()] == [youngest]


def test_more_live_sessions_than_the_core_has_places_for_are_refused() -> None:
    bench = VllmBench(max_sequences=1)
    bench.submit(request(PROMPT, session="old", arrival_ns=1, credit=5))
    item = bench.submit(request(PROMPT, session="young", arrival_ns=2))
    bench.begin()
    (refused,) = bench.scheduler.take_responses()
    assert refused.request_id == item
    assert isinstance(refused.outcome, Overloaded)


@pytest.mark.parametrize("fails_before", [True, False])
def test_sessions_of_a_failed_step_begin_anew(bench: VllmBench, *, fails_before: bool) -> None:
    answer(bench, request(PROMPT, session="cut", credit=5))
    for message in (request(PROMPT, session="a"), request([*PROMPT, TRUE[0]], start=0, session="cut")):
        bench.submit(message)
    plan = bench.begin()
    if fails_before:
        bench.core.failure = ServerFault("a step that fails")
        with pytest.raises(ServerFault):
            bench.target.run(plan)
    else:
        bench.target.run(plan)
    bench.target.fail(plan, Unavailable("the step failed"))
    assert [type(one.outcome) for one in bench.target.take_responses()] == [Unavailable, Unavailable]
    assert tokens_of(answer(bench, request(PROMPT, session="a", credit=2))) == TRUE[:3]
    assert len(bench.core.ids) == 1
    bench.check()


def test_all_requests_end_once_the_core_is_lost(bench: VllmBench) -> None:
    first = bench.submit(request(PROMPT, session="a", credit=9))
    bench.step()
    plan = bench.begin()
    second = bench.submit(request(PROMPT, session="b"))
    bench.core.failure = CoreLost("a rank was killed")
    with pytest.raises(CoreLost):
        bench.target.run(plan)
    bench.target.fail(plan, Unavailable("the step failed"))
    responses = bench.target.take_responses()
    assert [one.request_id for one in responses] == [first, second]
    assert all(isinstance(one.outcome, Unavailable) for one in responses)
    assert bench.target.queue_depth == 0
    assert bench.target.plan(bench.now) is None


def test_bad_logits_end_their_request_alone() -> None:
    bench = VllmBench(draw=stub_outcome)
    other = bench.submit(request(PROMPT, session="other"))
    item = bench.submit(request([*PROMPT, STUB_POISON], session="bad"))
    outcomes = {one.request_id: one.outcome for one in bench.step()}
    assert isinstance(outcomes[item], Broken)
    assert isinstance(outcomes[other], Confirmed)
    assert isinstance(fault(bench, request([*PROMPT, STUB_POISON], session="bad")), Broken)
    bench.check()


def test_a_drained_target_ends_each_request_with_its_next_result(bench: VllmBench) -> None:
    bench.submit(request(PROMPT, credit=9))
    assert result_of(bench.step()[0]).more
    bench.target.drain()
    assert not result_of(bench.step()[0]).more
    assert bench.target.queue_depth == 0


def test_a_step_that_never_ran_leaves_no_sequence_behind(bench: VllmBench) -> None:
    answer(bench, request(PROMPT, session="cut", credit=5))
    bench.submit(request([*PROMPT, TRUE[0]], session="cut"))
    bench.begin()
    bench.target.abandon(Unavailable("the scheduler has failed"))
    bench.target.take_responses()
    answer(bench, request(PROMPT, session="other"))
    assert len(bench.core.ids) == 1


def test_an_abandoned_target_forgets_its_sessions_and_goes_on(bench: VllmBench) -> None:
    item = bench.submit(request(PROMPT, credit=9))
    bench.step()
    error = Unavailable("the scheduler has failed")
    bench.target.abandon(error)
    assert bench.target.take_responses() == [Response(item, error)]
    assert tokens_of(answer(bench, request(PROMPT))) == TRUE[:1]
    assert bench.core.ids == {"2"}

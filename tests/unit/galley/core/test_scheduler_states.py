"""States in the scheduler: of which rows they are wanted, and to which tokens those that come belong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from galley.core.content import Miss
from galley.core.errors import Broken, Unavailable
from galley.core.features import MAX_FEATURE_TOKENS, NO_STATES
from galley.core.scheduler.messages import Confirmed, VerifyRequest
from galley.core.step import Sampled
from galley.core.trees import ROOT
from tests.fakes.scheduler_world import Bench, request, result_of, true_answer
from tests.fakes.states import states_of
from tests.fakes.truth import IDS

PROMPT = [3, 1, 4, 1, 5]
ANSWER = true_answer(PROMPT, 60)
TRUE = [*PROMPT, *ANSWER]
LAYERS = (2, 5, 8)


def wanting(tokens: Sequence[int] = PROMPT, **given: object) -> VerifyRequest:
    return request(tokens, **{"feature_layers": LAYERS, **given})  # type: ignore[arg-type]  # the test's own


def only_result(bench: Bench) -> Confirmed:
    (answer,) = bench.step()
    return result_of(answer)


def wrong(token: int) -> int:
    return (token + 1) % IDS


def test_states_are_those_of_the_rows_before_the_last_token() -> None:
    bench = Bench()
    bench.submit(wanting(draft_tokens=(*ANSWER[:2], wrong(ANSWER[2]), ANSWER[3])))
    result = only_result(bench)
    assert result.tokens == tuple(ANSWER[:3])
    assert result.states == states_of(TRUE, 0, 7, LAYERS)


def test_nothing_is_wanted_of_a_session_that_asks_for_none() -> None:
    bench = Bench()
    bench.submit(request(PROMPT, draft_tokens=tuple(ANSWER[:2])))
    bench.submit(wanting(session="other"))
    plan = bench.begin()
    assert [(chunk.feature_layers, chunk.feature_rows) for chunk in plan.chunks] == [((), 0), (LAYERS, 5)]
    plain, other = map(result_of, bench.finish(plan))
    assert plain.states is NO_STATES
    assert other.states == states_of(TRUE, 0, 5, LAYERS)


def test_results_of_one_request_follow_each_other() -> None:
    bench = Bench()
    item = bench.submit(wanting(draft_tokens=tuple(ANSWER[:2]), credit=8))
    (results,) = bench.results().values()
    assert len(results) == 9, item
    end = 0
    for result in results:
        assert result.states.position == end
        end = result.position + len(result.tokens) - 1
        assert result.states == states_of(TRUE, result.states.position, end, LAYERS)


def test_states_of_a_tree_are_those_of_the_accepted_path() -> None:
    bench = Bench()
    drafts = (wrong(ANSWER[0]), ANSWER[0], 0, ANSWER[1], wrong(ANSWER[2]))
    bench.submit(wanting(draft_tokens=drafts, survival=(0.9,) * 5, parents=(ROOT, ROOT, 0, 1, 3)))
    result = only_result(bench)
    assert (result.tokens, result.accepted, result.verified) == (tuple(ANSWER[:3]), 2, 5)
    assert result.states == states_of(TRUE, 0, 7, LAYERS)


def test_of_a_prompt_in_parts_only_the_part_that_draws_has_states() -> None:
    bench, prompt = Bench(max_rows=70, blocks=256), [token % IDS for token in range(150)]
    bench.submit(wanting(prompt))
    first, second = bench.begin(), None
    assert [(chunk.feature_layers, chunk.feature_rows) for chunk in first.chunks] == [((), 0)]
    assert bench.finish(first) == []
    bench.step()
    second = bench.begin()
    assert [(len(chunk.tokens), chunk.feature_rows) for chunk in second.chunks] == [(10, 10)]
    (answer,) = bench.finish(second)
    assert result_of(answer).states == states_of(prompt, 140, 150, LAYERS)


def test_of_a_long_prompt_the_last_tokens_have_states() -> None:
    bench, prompt = Bench(max_rows=256), [token % IDS for token in range(150)]
    bench.submit(wanting(prompt))
    plan = bench.begin()
    assert [chunk.feature_rows for chunk in plan.chunks] == [MAX_FEATURE_TOKENS]
    (answer,) = bench.finish(plan)
    assert result_of(answer).states == states_of(prompt, 150 - MAX_FEATURE_TOKENS, 150, LAYERS)


def test_a_result_has_no_more_states_than_a_message_holds() -> None:
    bench, drafts = Bench(max_rows=256), true_answer(PROMPT, 80)
    bench.submit(wanting(draft_tokens=tuple(drafts), survival=(1.0,) * len(drafts)))
    plan = bench.begin()
    assert [chunk.feature_rows for chunk in plan.chunks] == [len(drafts) + 1]
    result = result_of(*bench.finish(plan))
    end = result.position + len(result.tokens) - 1
    assert result.states == states_of([*PROMPT, *result.tokens], end - MAX_FEATURE_TOKENS, end, LAYERS)


def test_states_end_before_the_stop_token() -> None:
    bench = Bench()
    at = next(i for i, token in enumerate(ANSWER) if i >= 2 and token not in ANSWER[:i])
    drafts, stops = tuple(ANSWER[: at + 3]), frozenset({ANSWER[at]})
    bench.submit(wanting(draft_tokens=drafts, prompt_len=len(PROMPT), stop_token_ids=stops))
    result = only_result(bench)
    assert result.tokens == tuple(ANSWER[: at + 1])
    assert result.states == states_of(TRUE, 0, len(PROMPT) + at, LAYERS)


def test_before_bad_logits_the_last_accepted_token_has_no_state_yet() -> None:
    bench = Bench()
    bench.submit(wanting(draft_tokens=tuple(ANSWER[:4]), credit=9))
    plan = bench.begin()
    before = states_of(TRUE, 0, 6, LAYERS)
    bench.engine.run(plan)
    bench.scheduler.conclude(plan, [Sampled(tuple(ANSWER[:2]), states=before.data)], bench.now)
    (answer,) = bench.scheduler.take_responses()
    assert result_of(answer).states == before
    assert only_result(bench).states.position == before.end


def test_no_states_come_where_only_tokens_after_a_stop_token_have_some() -> None:
    bench = Bench()
    drafts, stops = tuple(ANSWER[:3]), frozenset(ANSWER[:1])
    bench.submit(wanting(draft_tokens=drafts, prompt_len=len(PROMPT), stop_token_ids=stops))
    plan = bench.begin()
    of_drafts = states_of(TRUE, 6, 8, LAYERS)
    bench.scheduler.conclude(plan, [Sampled(tuple(ANSWER[:4]), states=of_drafts.data)], bench.now)
    (answer,) = bench.scheduler.take_responses()
    assert result_of(answer).tokens == tuple(ANSWER[:1])
    assert result_of(answer).states is NO_STATES


@pytest.mark.parametrize("whole", [True, False])
def test_after_a_failed_step_the_rows_that_are_fed_again_have_states(*, whole: bool) -> None:
    bench, failed = Bench(), Unavailable("the step failed") if whole else Broken("not a number")
    bench.submit(wanting(draft_tokens=tuple(ANSWER[:2]), credit=9))
    first = only_result(bench)
    plan = bench.begin()
    if isinstance(failed, Unavailable):
        bench.scheduler.fail(plan, failed)
    else:
        bench.scheduler.conclude(plan, [failed], bench.now)
    assert [answer.outcome for answer in bench.scheduler.take_responses()] == [failed]
    tokens = [*PROMPT, *first.tokens]
    bench.submit(wanting(tokens, start=first.kv_len))
    again = only_result(bench)
    assert again.states == states_of(TRUE, first.states.end, len(tokens), LAYERS)


def test_a_preempted_session_gets_the_states_of_what_is_fed_again() -> None:
    bench, prompt = Bench(blocks=8), [token % IDS for token in range(16)]
    young = bench.submit(wanting(prompt, session="young", arrival_ns=9, credit=99))
    tokens = [*prompt, *only_result(bench).tokens]
    bench.submit(wanting([1] * 24, session="old", arrival_ns=1))
    outcomes = {answer.request_id: answer.outcome for answer in bench.step()}
    missed = outcomes[young]
    assert isinstance(missed, Miss)
    bench.submit(wanting(tokens, start=missed.have, session="young", arrival_ns=9))
    assert only_result(bench).states == states_of(tokens, missed.have, len(tokens), LAYERS)


def test_cached_tokens_have_no_states() -> None:
    bench, prompt = Bench(), [token % IDS for token in range(14)]
    bench.submit(wanting(prompt, session="before"))
    bench.step()
    bench.submit(wanting(prompt, session="later"))
    result = only_result(bench)
    assert result.kv_reused > 0
    assert result.states == states_of(prompt, result.kv_reused, len(prompt), LAYERS)

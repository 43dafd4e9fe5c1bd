"""What the scheduler puts into a pass, and what becomes of each item."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import pairwise, product

import numpy as np
import pytest

from galley.core.audit import AUDIT_PRIORITY
from galley.core.content import Miss, SessionKey, block_hashes, prefix_hash
from galley.core.cost.model import StepTimes
from galley.core.errors import Broken, DeadlinePassed, InvalidField, Overloaded, Unavailable
from galley.core.hints import Hint
from galley.core.kv import session as kv_session
from galley.core.kv.table import KvTable, Reservation
from galley.core.scheduler.messages import Confirmed, Response, Superseded
from galley.core.scheduler.scheduler import Linger
from galley.core.step import GrowingTokens, Sampled, TokenRange
from tests.fakes.kv_check import check_table
from tests.fakes.scheduler_world import (
    FLAT,
    MS,
    RISING,
    STEEP,
    Bench,
    request,
    result_of,
    true_answer,
)
from tests.fakes.truth import IDS, true_id

PROMPT = [3, 1, 4, 1, 5]
ANSWER = true_answer(PROMPT, 60)


def wrong(tokens: list[int]) -> tuple[int, ...]:
    return tuple((token + 1) % IDS for token in tokens)


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(salt + i * i) % IDS for i in range(length)]


def only(answers: list[Response]) -> Confirmed:
    (answer,) = answers
    return result_of(answer)


def test_a_request_without_credit_has_one_result() -> None:
    bench = Bench()
    bench.submit(request(PROMPT, draft_tokens=tuple(ANSWER[:3])))
    result = only(bench.step())
    assert (result.position, result.tokens, result.accepted, result.verified) == (5, tuple(ANSWER[:4]), 3, 3)
    assert not result.more
    assert bench.scheduler.plan(bench.now) is None


def test_a_request_that_brings_its_hashes_is_served_from_the_same_blocks() -> None:
    bench, long = Bench(), prompt(30)
    bench.submit(request(long))
    bench.step()
    chain = bench.scheduler.block_chain((b"", "t"), 0, prefix_hash(()))
    assert chain is not None
    chain.add(long)
    bench.submit(request(long, session="t", block_hashes=chain.hashes))
    assert only(bench.step()).kv_reused == 28


def test_the_hashes_of_a_cached_prefix_are_continued() -> None:
    bench, long = Bench(), prompt(30)
    bench.submit(request(long[:18]))
    bench.step()
    assert bench.scheduler.block_chain((b"", "s"), 15, prefix_hash(long[:14])) is None
    chain = bench.scheduler.block_chain((b"", "s"), 15, prefix_hash(long[:15]))
    assert chain is not None
    chain.add(long[15:])
    assert chain.hashes == block_hashes(b"", long, 4)
    bench.submit(request(long, start=15, block_hashes=chain.hashes))
    assert only(bench.step()).kv_reused == 18


def test_a_session_that_loses_its_blocks_before_its_step_finds_them_by_known_hashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, long = Bench(max_sessions=2), prompt(30)
    bench.submit(request(long, arrival_ns=2))
    answer = only(bench.step()).tokens
    bench.submit(request([1], session="idle", arrival_ns=3))
    bench.step()
    again = bench.submit(request([*long, *answer], start=29, arrival_ns=2))
    bench.submit(request([7], session="older", arrival_ns=1))
    monkeypatch.delattr(kv_session, "next_block_hash")
    results = {response.request_id: result_of(response) for response in bench.step()}
    assert results[again].kv_reused == 28


def test_credit_counts_tokens_after_the_first_result() -> None:
    bench = Bench()
    item = bench.submit(request(PROMPT, draft_tokens=wrong(ANSWER[:2]), credit=3))
    results = bench.results()[item]
    # Two draft tokens and one of the target's own were requested, three more were not.
    assert [token for result in results for token in result.tokens] == ANSWER[:6]
    assert [result.more for result in results] == [True] * 5 + [False]


def test_a_hint_confirms_up_to_the_limit_and_no_further() -> None:
    bench = Bench()
    item = bench.submit(request(PROMPT, credit=4))
    bench.extend(item, hint=Hint(6, prefix_hash([*PROMPT, ANSWER[0]]), tuple(ANSWER[1:20])))
    assert only(bench.step()).tokens == tuple(ANSWER[:1])
    second = only(bench.step())
    assert (second.tokens, second.verified, second.more) == (tuple(ANSWER[1:5]), 3, False)


def test_the_rest_of_a_hint_stays_while_it_agrees() -> None:
    # Two rows cost what one does, a third as much as a whole pass: one draft token a pass.
    times = StepTimes.measured([(1, 10 * MS), (2, 10 * MS), (3, 30 * MS)])
    bench = Bench(times=times)
    item = bench.submit(request(PROMPT[:1], credit=20))
    true = true_answer(PROMPT[:1], 8)
    bench.extend(item, hint=Hint(1, prefix_hash(PROMPT[:1]), (*true[:6], *wrong(true[6:7]), true[7])))
    results = [only(bench.step()) for _ in range(5)]
    assert [result.verified for result in results] == [1, 1, 1, 1, 1], "one more token a pass"
    assert [result.accepted for result in results] == [1, 1, 1, 0, 1], (
        "one is wrong, and the one after it right"
    )


def test_a_hint_after_other_tokens_is_not_verified() -> None:
    bench = Bench()
    item = bench.submit(request(PROMPT, credit=20))
    bench.extend(item, hint=Hint(5, prefix_hash(wrong(PROMPT)), tuple(ANSWER[:8])))
    assert {result.verified for result in bench.results()[item]} == {0}


def test_a_hint_that_is_wrong_twice_running_is_dropped() -> None:
    bench = Bench()
    item = bench.submit(request(PROMPT, credit=20))
    bench.extend(item, hint=Hint(5, prefix_hash(PROMPT), (*wrong(ANSWER[:2]), *ANSWER[2:8])))
    results = [only(bench.step()) for _ in range(4)]
    assert results[0].verified == 8
    assert [result.accepted for result in results] == [0, 0, 0, 0]
    assert [result.verified for result in results[2:]] == [0, 0]


def test_where_hints_recover_from_rejected_tokens_more_of_the_rest_is_verified() -> None:
    times = StepTimes.measured([(rows, (10 + 2 * rows) * MS) for rows in range(1, 64)])
    bench = Bench(times=times)
    item = bench.submit(request(PROMPT, credit=30))
    first = only(bench.step())
    every_fourth = [
        wrong(ANSWER[i : i + 1])[0] if i % 4 == 3 else token for i, token in enumerate(ANSWER[:30])
    ]
    bench.extend(item, hint=Hint(5, prefix_hash(PROMPT), tuple(every_fourth)))
    results = [first, *bench.results()[item]]
    assert [token for result in results for token in result.tokens] == ANSWER[:31]
    after_refusals = [
        now for before, now in pairwise(results) if before.accepted < before.verified and now.verified
    ]
    assert len(after_refusals) >= 3
    assert all(result.accepted for result in after_refusals), "all of them were right again"


def test_a_new_hint_that_ends_early_is_continued_by_the_one_before() -> None:
    bench = Bench()
    item = bench.submit(request(PROMPT, credit=20))
    bench.extend(item, hint=Hint(5, prefix_hash(PROMPT), (*wrong(ANSWER[:1]), *ANSWER[1:9])))
    bench.extend(item, hint=Hint(5, prefix_hash(PROMPT), tuple(ANSWER[:3])))
    results = [only(bench.step()) for _ in range(2)]
    assert [(result.verified, result.accepted) for result in results] == [(3, 3), (5, 5)]


def test_no_more_draft_tokens_are_verified_in_a_step_than_the_request_allows() -> None:
    bench = Bench()
    item = bench.submit(request(PROMPT, credit=20, max_verified=2))
    bench.extend(item, hint=Hint(5, prefix_hash(PROMPT), tuple(ANSWER[:9])))
    results = [only(bench.step()) for _ in range(3)]
    assert [result.verified for result in results] == [2, 2, 2]


def test_an_extension_never_lowers_the_limit_nor_exceeds_max_position() -> None:
    bench = Bench()
    item = bench.submit(request(PROMPT, credit=3, max_position=11))
    bench.extend(item, limit=6)
    bench.extend(item, limit=100)
    assert sum(len(result.tokens) for result in bench.results()[item]) == 6


def test_a_stop_token_ends_after_min_tokens() -> None:
    bench = Bench()
    stop = frozenset([ANSWER[0]])
    later = next(i for i, token in enumerate(ANSWER) if token == ANSWER[0] and i >= 2)
    item = bench.submit(
        request(PROMPT, credit=50, prompt_len=5, stop_token_ids=stop, min_tokens=2, max_position=60)
    )
    results = bench.results()[item]
    assert [token for result in results for token in result.tokens] == ANSWER[: later + 1]
    assert not results[-1].more


def test_draining_ends_requests_with_their_next_result() -> None:
    bench = Bench()
    bench.submit(request(PROMPT, credit=50))
    bench.step()
    bench.scheduler.drain()
    assert not only(bench.step()).more
    assert bench.scheduler.plan(bench.now) is None


def test_draft_rows_pay_on_a_flat_curve_and_not_on_a_steep_one() -> None:
    drafts = tuple(ANSWER[:4])
    for times, verified in ((FLAT, 4), (STEEP, 0)):
        bench = Bench(times=times)
        bench.submit(request(PROMPT))
        bench.step()
        bench.submit(request(PROMPT, start=4, draft_tokens=drafts))
        assert only(bench.step()).verified == verified


def test_rows_go_to_the_drafts_that_are_likeliest_to_survive() -> None:
    # Up to four rows cost the same, each beyond as much as the whole pass.
    times = StepTimes.measured([(1, 10 * MS), (4, 10 * MS), (5, 20 * MS)])
    bench = Bench(times=times)
    for name in ("good", "bad"):
        bench.submit(request(PROMPT, session=name))
    bench.step()
    survivals = {"good": (0.9, 0.8, 0.7), "bad": (0.5, 0.2, 0.1)}
    items = {
        bench.submit(
            request(PROMPT, start=4, session=name, draft_tokens=tuple(ANSWER[:3]), survival=survival)
        ): name
        for name, survival in survivals.items()
    }
    verified = {items[answer.request_id]: result_of(answer).verified for answer in bench.step()}
    assert verified == {"good": 2, "bad": 0}


def test_a_doubtful_draft_pays_no_more_beside_a_long_prompt() -> None:
    times = StepTimes.measured([(1, 12 * MS), (101, 212 * MS)])
    bench = Bench(times=times, max_rows=128, blocks=128)
    bench.submit(request(PROMPT, session="a"))
    bench.step()
    drawn = bench.submit(
        request(PROMPT, start=4, session="a", draft_tokens=tuple(ANSWER[:1]), survival=(0.2,))
    )
    bench.submit(request(prompt(80), session="b"))
    results = {answer.request_id: result_of(answer) for answer in bench.step()}
    assert results[drawn].verified == 0
    assert results[drawn].compute_ns == times(81)
    assert results[drawn].prefill_ns == times(81) - times(2)


def test_useless_drafts_get_no_rows_until_they_are_right_again() -> None:
    # A second row costs a third of a pass: it pays from an acceptance of a third on.
    times = StepTimes.measured([(1, 30 * MS), (2, 40 * MS)])
    bench = Bench(times=times)
    tokens = list(PROMPT)
    tried = []
    for i in range(60):
        truly = true_answer(tokens, 1)
        bench.submit(request(tokens, draft_tokens=wrong(truly) if i < 40 else tuple(truly)))
        tried.append(only(bench.step()).verified)
        tokens += truly
    assert tried[0] == 1
    first_without = tried.index(0)
    assert first_without < 12
    assert not any(tried[first_without:40])
    assert tried[-1] == 1, "plain decoding has shown that the drafts were right"


def test_a_session_that_arrives_during_a_step_joins_the_next() -> None:
    bench = Bench()
    first = bench.submit(request(PROMPT, session="a", credit=9))
    plan = bench.begin()
    second = bench.submit(request(PROMPT, session="b", credit=9))
    assert [answer.request_id for answer in bench.finish(plan)] == [first]
    assert {answer.request_id for answer in bench.step()} == {first, second}


def test_a_long_prompt_takes_one_budget_a_step_and_the_others_go_on() -> None:
    bench = Bench(max_rows=16, blocks=128)
    talker = bench.submit(request(PROMPT, session="talker", credit=99, arrival_ns=5))
    bench.step()
    bench.submit(request(prompt(70), session="long", arrival_ns=1))
    rows: list[int] = []
    while len(rows) < 5:
        plan = bench.begin()
        rows.append(plan.rows)
        assert talker in {answer.request_id for answer in bench.finish(plan)}
    assert rows == [16, 16, 16, 16, 11], "15 rows beside the talker's one, and the rest at last"


def test_verifications_leave_prompts_a_quarter_of_the_budget() -> None:
    bench = Bench(max_rows=16, blocks=128)
    for i in range(14):
        bench.submit(request([i % IDS, 2], session=f"s{i}", credit=99, arrival_ns=1))
    for _ in range(3):
        bench.step()
    bench.submit(request(prompt(20), session="late", arrival_ns=99))
    plan = bench.begin()
    assert sorted(len(chunk.tokens) for chunk in plan.chunks) == [1] * 14 + [4]


def test_draft_tokens_after_a_part_of_a_prompt_take_none_of_its_rows() -> None:
    bench = Bench(max_rows=16)
    bench.submit(request(prompt(30), draft_tokens=tuple(true_answer(prompt(30), 4))))
    assert [len(chunk.tokens) for chunk in bench.begin().chunks] == [16]


def test_draft_tokens_are_verified_beside_a_part_of_a_prompt() -> None:
    bench = Bench(max_rows=16)
    item = bench.submit(request(PROMPT, session="young", credit=9, arrival_ns=9))
    bench.step()
    bench.extend(item, hint=Hint(6, prefix_hash([*PROMPT, ANSWER[0]]), tuple(ANSWER[1:5])))
    bench.submit(request(prompt(30), session="old", arrival_ns=1))
    assert [len(chunk.tokens) for chunk in bench.begin().chunks] == [11, 5]


def test_prompts_are_filled_oldest_first() -> None:
    bench = Bench(max_rows=16)
    bench.submit(request(prompt(30, 1), session="young", arrival_ns=9))
    bench.submit(request(prompt(20, 2), session="old", arrival_ns=1))
    assert [list(chunk.tokens) for chunk in bench.begin().chunks] == [prompt(20, 2)[:16]]


def test_a_prompt_that_others_have_computed_is_not_computed_again() -> None:
    bench = Bench()
    bench.submit(request(prompt(16), session="a"))
    bench.step()
    bench.submit(request([*prompt(16), 1], session="b"))
    bench.submit(request([*prompt(16), 1], session="c", salt=b"other"))
    assert sorted(len(chunk.tokens) for chunk in bench.begin().chunks) == [1, 17]


def test_a_newer_request_supersedes_an_older_one() -> None:
    bench = Bench()
    old = bench.submit(request(PROMPT, credit=9))
    bench.step()
    new = bench.submit(request([*PROMPT, ANSWER[0]], start=5))
    over, result = bench.step()
    assert (over.request_id, over.outcome) == (old, Superseded(6, prefix_hash([*PROMPT, ANSWER[0]])))
    assert result.request_id == new


def test_slice_replaces_confirmed_tokens() -> None:
    bench = Bench()
    bench.submit(request(PROMPT, credit=9))
    bench.step()
    other = [*PROMPT[:4], 0, 0, 2]
    item = bench.submit(request(other))
    (result,) = (result_of(answer) for answer in bench.step() if answer.request_id == item)
    assert result.tokens == (true_id(other),)


def test_a_request_during_a_step_of_its_session_waits() -> None:
    bench = Bench()
    first = bench.submit(request(PROMPT, credit=9))
    plan = bench.begin()
    second = bench.submit(request([*PROMPT, ANSWER[0]], start=5))
    third = bench.submit(request([*PROMPT, ANSWER[0]], start=5))
    assert not bench.scheduler.take_responses()
    answers = bench.finish(plan)
    assert [(answer.request_id, type(answer.outcome)) for answer in answers] == [
        (first, Confirmed),
        (first, Superseded),
        (second, Superseded),
    ]
    assert [answer.request_id for answer in bench.step()] == [third]


def test_cancelling_during_a_step_keeps_the_kv() -> None:
    bench = Bench()
    item = bench.submit(request(prompt(20), credit=9))
    plan = bench.begin()
    bench.scheduler.cancel(item)
    held = bench.table.live_blocks
    assert held > 0
    assert not bench.finish(plan)
    assert bench.table.live_blocks == 0
    assert len(bench.table.tokens_of((b"", "s"))) == 20
    bench.submit(request(prompt(20)))
    assert [len(chunk.tokens) for chunk in bench.begin().chunks] == [1]


def test_a_failed_step_costs_only_what_it_computed() -> None:
    bench = Bench(max_rows=8)
    item = bench.submit(request(prompt(12)))
    bench.finish(bench.begin())
    plan = bench.begin()
    bench.scheduler.fail(plan, Unavailable("the step failed"))
    (failed,) = bench.scheduler.take_responses()
    assert (failed.request_id, type(failed.outcome)) == (item, Unavailable)
    check_table(bench.table)
    bench.submit(request(prompt(12)))
    assert [len(chunk.tokens) for chunk in bench.begin().chunks] == [4]


def test_an_error_of_one_chunk_is_its_own() -> None:
    bench = Bench()
    sick, well = (bench.submit(request(PROMPT, session=name)) for name in ("sick", "well"))
    plan = bench.begin()
    bench.scheduler.conclude(plan, [Broken("not a number"), Sampled((ANSWER[0],))], bench.now)
    answers = {answer.request_id: answer.outcome for answer in bench.scheduler.take_responses()}
    assert isinstance(answers[sick], Broken)
    assert isinstance(answers[well], Confirmed)


@pytest.mark.parametrize("outcome", [None, Sampled(())])
def test_an_engine_without_a_token_ends_the_request(outcome: Sampled | None) -> None:
    bench = Bench()
    bench.submit(request(PROMPT, credit=9))
    plan = bench.begin()
    bench.scheduler.conclude(plan, [outcome], bench.now)
    (answer,) = bench.scheduler.take_responses()
    assert isinstance(answer.outcome, Broken)
    assert bench.scheduler.plan(bench.now) is None


def test_tokens_before_bad_logits_are_confirmed() -> None:
    bench = Bench()
    item = bench.submit(request(PROMPT, draft_tokens=tuple(ANSWER[:4]), credit=9))
    plan = bench.begin()
    bench.scheduler.conclude(plan, [Sampled(tuple(ANSWER[:2]))], bench.now)
    result = only(bench.scheduler.take_responses())
    assert (result.tokens, result.accepted, result.verified) == (tuple(ANSWER[:2]), 2, 2)
    assert (result.kv_len, result.more) == (6, True)
    plan = bench.begin()
    assert plan.chunks[0].tokens[0] == ANSWER[1], "the last confirmed token is fed again"
    broken = Broken("no finite maximum")
    bench.scheduler.conclude(plan, [broken], bench.now)
    assert [(answer.request_id, answer.outcome) for answer in bench.scheduler.take_responses()] == [
        (item, broken)
    ]
    check_table(bench.table)


def test_the_sessions_of_a_step_are_not_copied_for_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, seen = Bench(), list[Container[SessionKey]]()

    def reserve(key: SessionKey, length: int, busy: Container[SessionKey] = ()) -> Reservation:
        seen.append(busy)
        return KvTable.reserve(bench.table, key, length, busy)

    monkeypatch.setattr(bench.table, "reserve", reserve)
    for session in "abc":
        bench.submit(request(PROMPT, session=session))
    bench.step()
    first, *others = seen
    assert len(others) == 2
    assert all(busy is first for busy in others)


def test_the_history_of_a_request_grows_from_step_to_step() -> None:
    bench = Bench()
    bench.submit(request(PROMPT, credit=9))
    histories: list[Sequence[int]] = []
    for _ in range(3):
        plan = bench.begin()
        draw = plan.chunks[0].draw
        assert draw is not None
        assert list(draw.history) == [*PROMPT, *ANSWER[: len(histories)]]
        histories.append(draw.history)
        bench.finish(plan)
    assert isinstance(histories[0], GrowingTokens)
    assert histories[0] is histories[1] is histories[2]


def test_a_range_of_tokens_is_as_the_list_of_them() -> None:
    tokens = GrowingTokens(range(10))
    for start, more in ((0, ()), (0, (70, 71)), (4, (70, 71, 72))):
        whole = [*tokens[start:9], *more]
        part = TokenRange(tokens, start, 9, more)
        assert list(part) == whole
        assert [part[at] for at in range(-len(whole), len(whole))] == whole * 2
        for first, end in product(range(-1, 14), repeat=2):
            assert part[first:end] == whole[first:end]
        assert part[::-2] == whole[::-2]
        copied = np.zeros(len(whole), np.int64)
        part.copy_to(copied)
        assert copied.tolist() == whole


def test_the_youngest_is_preempted_with_a_miss() -> None:
    bench = Bench(blocks=8, max_rows=64)
    young = bench.submit(request(prompt(16, 1), session="young", arrival_ns=9, credit=99))
    bench.step()
    old = bench.submit(request(prompt(24, 2), session="old", arrival_ns=1))
    answers = {answer.request_id: answer.outcome for answer in bench.step()}
    assert isinstance(answers[old], Confirmed)
    missed = answers[young]
    assert isinstance(missed, Miss)
    assert missed.prefix_hash == prefix_hash(prompt(16, 1)[: missed.have])
    counts = bench.scheduler.counts
    assert (counts.preempted, counts.out_of_blocks, counts.missed) == (1, 1, 0)
    assert bench.table.evicted_blocks > 0


def test_a_young_session_is_refused_when_older_ones_hold_all_blocks() -> None:
    bench = Bench(blocks=8)
    old = bench.submit(request(prompt(28, 1), session="old", arrival_ns=1, credit=3))
    bench.step()
    young = bench.submit(request(prompt(8, 2), session="young", arrival_ns=9))
    answers = {answer.request_id: answer.outcome for answer in bench.step()}
    assert isinstance(answers[old], Confirmed)
    refused = answers[young]
    assert isinstance(refused, Overloaded)
    assert refused.retry_after_s > 0
    counts = bench.scheduler.counts
    assert (counts.preempted, counts.out_of_blocks) == (0, 1)
    assert counts.prompt_tokens == 28, "a prompt that was not read is none without cached tokens"


def test_the_youngest_gives_its_slot_to_an_older_session() -> None:
    bench = Bench(max_sessions=2)
    items = [bench.submit(request(prompt(9, i), session=f"s{i}", arrival_ns=i, credit=50)) for i in (1, 2)]
    bench.step()
    old = bench.submit(request(PROMPT, session="old", arrival_ns=0))
    young = bench.submit(request(PROMPT, session="young", arrival_ns=3))
    answers = {answer.request_id: answer.outcome for answer in bench.step()}
    assert isinstance(answers[old], Confirmed)
    assert isinstance(answers[items[0]], Confirmed)
    missed = answers[items[1]]
    assert isinstance(missed, Miss)
    assert missed.have > 0, "it keeps what was cached of it"
    assert isinstance(answers[young], Overloaded)
    counts = bench.scheduler.counts
    assert (counts.preempted, counts.out_of_blocks) == (1, 0), "places ran out, not blocks"


@pytest.mark.parametrize("bounds", [{"blocks": 8}, {"max_sessions": 1}], ids=["blocks", "slot"])
def test_a_higher_priority_preempts_an_older_session(bounds: dict[str, int]) -> None:
    bench = Bench(**bounds)  # type: ignore[arg-type]  # sizes alone
    old = bench.submit(request(prompt(16, 1), session="old", arrival_ns=1, credit=99))
    bench.step()
    urgent = bench.submit(request(prompt(24, 2), session="urgent", arrival_ns=9, priority=1))
    answers = {answer.request_id: answer.outcome for answer in bench.step()}
    assert isinstance(answers[urgent], Confirmed)
    assert isinstance(answers[old], Miss)


def test_audits_do_not_change_how_many_draft_tokens_are_verified() -> None:
    """Their draft tokens are those of a token log, so nearly all are accepted."""

    def rows_after(*priorities: int) -> int:
        bench = Bench(times=StepTimes.measured([(1, 10 * MS), (17, 26 * MS)]))
        for number, priority in enumerate(priorities):
            given = [number, *PROMPT]
            drafts = tuple(true_answer(given, 8))
            message = request(given, session=f"{number}", draft_tokens=drafts, priority=priority)
            bench.submit(message)
            bench.results()
        bench.submit(request(PROMPT, session="client", draft_tokens=(1,) * 16))
        return bench.begin().rows

    assert rows_after(*[0] * 20) > rows_after(), "drafts of clients do"
    assert rows_after(*[AUDIT_PRIORITY] * 20) == rows_after()


def test_prompts_are_fed_by_priority_and_then_by_arrival() -> None:
    bench = Bench(max_rows=8)
    arrivals = {"late": (9, 0), "early": (1, 0), "urgent": (99, 5), "idle": (0, -5)}
    items = {}
    for index, (name, (arrival_ns, priority)) in enumerate(arrivals.items()):
        message = request(prompt(8, index), session=name, arrival_ns=arrival_ns, priority=priority)
        items[bench.submit(message)] = name
    fed = []
    for _ in arrivals:
        plan = bench.begin()
        fed += [items[item] for item in bench.scheduler.current_batch.request_ids]
        bench.finish(plan)
    assert fed == ["urgent", "early", "late", "idle"]


def submit_prompts(bench: Bench, tenant: str, count: int, length: int, arrival_ns: int = 0) -> None:
    for number in range(count):
        tokens, arrived_ns = prompt(length, ord(tenant) + number), arrival_ns + number
        session, salt = f"{tenant}{number}", tenant.encode()
        bench.submit(request(tokens, session=session, salt=salt, arrival_ns=arrived_ns))


def rows_of_step(bench: Bench) -> dict[str, int]:
    """Return how many tokens a step feeds of each session."""
    plan = bench.begin()
    rows = {chunk.key[1]: len(chunk.tokens) for chunk in plan.chunks}
    bench.finish(plan)
    return rows


def order_of_ends(bench: Bench) -> list[str]:
    """Return the sessions in the order in which their prompts are read."""
    ended: dict[str, None] = {}
    while bench.scheduler.queue_depth:
        for name in rows_of_step(bench):
            ended.pop(name, None)
            ended[name] = None
    return list(ended)


@pytest.mark.parametrize("length", [32, 40])  # of whole steps, and not
def test_the_long_prompts_of_a_tenant_hold_up_those_of_others_for_one_of_them(length: int) -> None:
    bench = Bench(max_rows=16, blocks=256)
    submit_prompts(bench, "a", 4, length)
    assert rows_of_step(bench) == {"a0": 16}
    submit_prompts(bench, "b", 1, length, arrival_ns=9)
    assert order_of_ends(bench) == ["a0", "b0", "a1", "a2", "a3"]


def test_a_tenant_that_comes_later_takes_turns_with_the_one_before() -> None:
    bench = Bench(max_rows=16, blocks=256)
    submit_prompts(bench, "a", 5, 32)
    for _ in range(4):
        rows_of_step(bench)
    submit_prompts(bench, "b", 3, 32, arrival_ns=9)
    assert order_of_ends(bench) == ["a2", "b0", "a3", "b1", "a4", "b2"]


def test_a_short_prompt_waits_for_no_long_one_unless_its_priority_is_lower() -> None:
    bench = Bench(max_rows=16, blocks=256)
    submit_prompts(bench, "a", 4, 40)
    submit_prompts(bench, "b", 2, 4, arrival_ns=9)
    bench.submit(request(prompt(3), session="idle", salt=b"c", arrival_ns=9, priority=-1))
    assert rows_of_step(bench) == {"a0": 12, "b0": 4}
    assert rows_of_step(bench) == {"a0": 12, "b1": 4}


def test_too_many_waiting_refuse_the_youngest_of_least_priority() -> None:
    bench = Bench(max_waiting=2)
    low = [
        bench.submit(request(prompt(9, i), session=f"s{i}", arrival_ns=i, priority=-1, credit=1))
        for i in (1, 2)
    ]
    with pytest.raises(Overloaded):
        bench.submit(request(PROMPT, session="younger", arrival_ns=3, priority=-1))
    urgent = bench.submit(request(PROMPT, session="urgent", arrival_ns=3))
    [refused] = bench.scheduler.take_responses()
    assert (refused.request_id, type(refused.outcome)) == (low[1], Overloaded)
    assert {answer.request_id for answer in bench.step()} == {low[0], urgent}
    check_table(bench.table)


def test_a_prompt_beyond_the_kv_memory_is_refused() -> None:
    with pytest.raises(InvalidField, match="32 tokens"):
        Bench(blocks=8).submit(request(prompt(33)))


def test_too_many_waiting_requests_are_refused() -> None:
    bench = Bench(max_waiting=2)
    for name in "ab":
        bench.submit(request(PROMPT, session=name))
    with pytest.raises(Overloaded):
        bench.submit(request(PROMPT, session="c"))
    bench.step()
    bench.submit(request(PROMPT, session="c"))


def test_a_deadline_counts_until_the_work_begins() -> None:
    bench = Bench(max_rows=8)
    started = bench.submit(request(prompt(20), session="started", deadline_ns=5))
    bench.step()
    late = bench.submit(request(PROMPT, session="late", deadline_ns=bench.now))
    bench.scheduler.expire(bench.now)
    answers = bench.scheduler.take_responses()
    assert [(answer.request_id, type(answer.outcome)) for answer in answers] == [(late, DeadlinePassed)]
    assert list(bench.results()) == [started]


def test_a_miss_names_the_cached_prefix() -> None:
    bench = Bench()
    bench.submit(request(PROMPT))
    bench.step()
    bench.submit(request([*PROMPT, 1, 2, 3], start=7))
    bench.submit(request([9, 9, 9, 9], start=3, session="unknown"))
    short, nothing = (answer.outcome for answer in bench.scheduler.take_responses())
    assert short == Miss(5, prefix_hash(PROMPT))
    assert nothing == Miss(0, prefix_hash([]))
    assert bench.scheduler.counts.missed == 2


def test_times_since_the_last_result() -> None:
    bench = Bench()
    bench.submit(request(PROMPT, credit=1))
    bench.now += 3 * MS
    first, second = only(bench.step()), only(bench.step())
    assert first.queue_ns == 3 * MS
    assert first.compute_ns == FLAT(5)
    assert bench.scheduler.queue_times_ns == [], "of the second pass, which was no item's first"
    assert (second.queue_ns, second.compute_ns) == (0, FLAT(1))


def test_a_result_has_the_times_of_its_step() -> None:
    bench = Bench(times=RISING)
    bench.submit(request(PROMPT, credit=2, draft_tokens=tuple(ANSWER[:3])))
    plan = bench.begin()
    [answer] = bench.finish_as(plan, b"span")
    drafted, plain = result_of(answer), only(bench.step())
    assert drafted.batch_rows == plan.rows
    assert drafted.batch_span == b"span"
    rows = plan.rows - drafted.verified
    assert drafted.verified > 0
    assert drafted.compute_ns - drafted.plain_ns == RISING(plan.rows) - RISING(rows)
    assert plain.plain_ns == plain.compute_ns


def test_the_first_result_has_the_cached_tokens() -> None:
    bench = Bench()
    bench.submit(request(prompt(16), session="a"))
    bench.step()
    bench.submit(request([*prompt(16), 1], session="b", credit=1))
    first, second = only(bench.step()), only(bench.step())
    assert (first.kv_reused, second.kv_reused) == (16, 0)
    counts = bench.scheduler.counts
    assert (counts.prompt_tokens, counts.reused_tokens) == (16 + 17, 16)


def test_abandon_ends_all_requests_and_clears_the_kv() -> None:
    bench = Bench()
    bench.submit(request(PROMPT, session="idle"))
    bench.step()
    items = [bench.submit(request(PROMPT, session=f"s{i}", credit=9)) for i in range(2)]
    bench.begin()
    items.append(bench.submit(request(PROMPT, session="s1")))
    error = Unavailable("failed")
    bench.scheduler.abandon(error)
    answers = bench.scheduler.take_responses()
    assert [(answer.request_id, answer.outcome) for answer in answers] == [(item, error) for item in items]
    assert (bench.scheduler.queue_depth, bench.table.live_blocks) == (0, 0)
    assert bench.table.cached_prefixes(9) == []
    item = bench.submit(request(PROMPT, session="s1", credit=5))
    assert [token for result in bench.results()[item] for token in result.tokens] == ANSWER[:6]


def test_one_step_at_a_time() -> None:
    bench = Bench()
    bench.submit(request(PROMPT))
    plan = bench.begin()
    with pytest.raises(Broken):
        bench.scheduler.plan(bench.now)
    bench.finish(plan)
    with pytest.raises(Broken):
        bench.scheduler.conclude(plan, [None], bench.now)


def long_bench(blocks: int) -> Bench:
    return Bench(blocks=blocks, block_tokens=1, max_rows=8192)


def calls_of_plan(bench: Bench) -> int:
    """Run the next step; return how many calls it took to plan it."""
    calls = 1
    while isinstance(plan := bench.scheduler.plan(bench.now), Linger):
        assert plan == Linger(bench.now)
        calls += 1
    assert plan is not None
    bench.finish(plan)
    return calls


def test_long_sessions_are_opened_one_a_call() -> None:
    bench, long = long_bench(4096), prompt(1500)
    bench.submit(request(long, max_position=2000))
    calls_of_plan(bench)
    for name in "abc":
        bench.submit(request(long, session=name, max_position=2000))
    assert calls_of_plan(bench) == 4
    assert not bench.scheduler.queue_depth


def test_long_idle_sessions_are_evicted_one_a_call() -> None:
    bench, long = long_bench(1510), prompt(1500)
    for name in "abcd":
        bench.submit(request(long, session=name, max_position=2000))
        calls_of_plan(bench)
    bench.submit(request(prompt(100, salt=7), session="e"))
    assert calls_of_plan(bench) == 4
    assert not bench.scheduler.queue_depth

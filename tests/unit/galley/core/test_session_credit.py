"""Credit (see the design): extensions of a Verify, and late, wrong or missing hints."""

from __future__ import annotations

import pytest

from galley.core.errors import Broken
from galley.core.records import PositionLogprobs
from galley.core.session import events as ev
from galley.core.session.machine import SessionLimits
from tests.fakes.session_world import MS, World, spec
from tests.fakes.truth import STOP_ID, letters, true_id

ENDLESS = frozenset[int]()


def world(k: int = 4, credit: int = 32, length: int = 57, **limits: int) -> World:
    return World(
        spec(k=k, stop_token_ids=ENDLESS, max_position=3 + length), SessionLimits(credit=credit, **limits)
    )


def sent_extensions(here: World) -> list[ev.ExtendVerify]:
    return [message for message in here.to_target if isinstance(message, ev.ExtendVerify)]


def test_plain_decoding_takes_one_request() -> None:
    here = world(k=0, credit=32, length=500, buffer=1000)
    here.run_to_end()
    assert here.seen == here.truth[3:]
    assert here.verifies == 1
    assert here.extensions <= 500 // 8


def test_credit_is_renewed_before_it_runs_out() -> None:
    here = world(k=0, credit=32, length=300)
    here.deliver()
    while here.item is not None and not here.over:
        here.target_passes()
        if len(here.answers) > 8:  # the wire and the gateway lag eight tokens behind
            here.deliver_answer()
            here.store()
            here.take()
            while here.to_target:
                here.deliver()
    assert here.verifies == 1


def test_verdicts_that_come_together_share_a_commit() -> None:
    here = world(k=0, credit=8, length=5)
    here.deliver()
    for _ in range(5):
        here.target_passes()
    effects = here.session.step(*here.answers, now=here.now)
    [commit] = [effect for effect in effects if isinstance(effect, ev.Commit)]
    assert list(commit.tokens) == here.truth[3:8]
    assert len([effect for effect in effects if isinstance(effect, ev.RoundEnded)]) == 5
    [emit] = [
        effect for effect in here.session.step(ev.Committed(8), now=here.now) if isinstance(effect, ev.Emit)
    ]
    assert (emit.start, emit.end) == (0, 5)


def test_verdicts_that_come_together_request_one_proposal() -> None:
    """An earlier one would be for a token that is confirmed already."""
    here = world(credit=8, length=20)
    here.deliver()
    for _ in range(5):
        here.target_passes()
    effects = here.session.step(*here.answers, now=here.now)
    assert len([effect for effect in effects if isinstance(effect, ev.RoundEnded)]) == 5
    [request] = [effect for effect in effects if isinstance(effect, ev.Propose)]
    assert len(request.slice.tokens) == 8
    assert len([effect for effect in effects if isinstance(effect, ev.CancelPropose)]) == 1
    assert len([effect for effect in effects if isinstance(effect, ev.ExtendVerify)]) <= 1


def test_the_first_verify_does_not_wait_for_a_proposal() -> None:
    here = world()
    [request] = here.to_target
    assert isinstance(request, ev.Verify)
    assert request.hint_due
    assert request.draft_tokens == ()
    assert "draft" in here.waiting
    here.draft_answers()
    [extension] = sent_extensions(here)
    assert extension.hint is not None
    assert len(extension.hint.draft_tokens) == 4
    assert extension.hint_due, "another will be, as soon as this one has its verdict"


def test_a_round_takes_one_message_to_the_target() -> None:
    here = world(length=100)
    here.run_to_end()
    assert here.seen == here.truth[3:]
    assert here.verifies == 1
    assert here.extensions <= 1.5 * here.session.stats.rounds


def proposing(here: World) -> ev.Propose:
    request = here.waiting["draft"]
    assert isinstance(request, ev.Propose)
    return request


def end_of(request: ev.Propose) -> int:
    return request.slice.start + len(request.slice.tokens)


def test_drafting_continues_during_verification() -> None:
    here = world()
    here.draft_answers()
    request = proposing(here)
    assert (end_of(request), request.ahead) == (7, 4)
    assert request.slice.tokens[-4:] == tuple(here.truth[3:7])
    here.draft_answers()
    here.target_answers()
    assert len(here.session.answer.output) == 5
    here.target_answers()
    assert len(here.session.answer.output) == 9, "the next pass has draft tokens as soon as this one ends"
    assert here.session.stats.accepted == 7


def test_a_proposal_after_a_rejected_token_is_replaced() -> None:
    here = world()
    here.draft_answers(spoil_at=1)
    before = proposing(here)
    assert before.ahead == 4
    here.target_answers()
    assert len(here.session.answer.output) == 2
    assert here.session.stats.cancelled == 1
    after = proposing(here)
    assert after.request_id != before.request_id
    assert (end_of(after), after.ahead) == (5, 0)
    assert after.slice.start <= 4, "the draft's cache is trusted only as far as it was right"


def test_a_proposal_after_accepted_tokens_is_used() -> None:
    here = world()
    here.draft_answers()
    before = proposing(here)
    here.target_answers()
    assert proposing(here).request_id == before.request_id
    here.draft_answers()
    assert here.session.stats.cancelled == 0
    hint = sent_extensions(here)[-1].hint
    assert hint is not None
    assert hint.position == 8
    assert hint.draft_tokens == tuple(here.truth[8 : 8 + len(hint.draft_tokens)]), (
        "its first came true meanwhile"
    )


def test_no_hint_is_due_where_none_is_worth_drafting() -> None:
    here = world(length=7)
    here.draft_answers()
    here.target_answers()
    here.draft_answers()
    assert here.to_target != []
    here = world(length=6)
    here.draft_answers()
    here.target_answers()
    assert "draft" not in here.waiting, "one token is left"
    assert [message.hint_due for message in sent_extensions(here)] == [False]


def test_the_log_says_which_tokens_were_drafted() -> None:
    here = world()
    here.draft_answers()
    here.target_answers()
    here.store()
    assert [record.from_draft for record in here.records] == [True, True, True, True, False]


def test_a_late_hint_is_used() -> None:
    here = world()
    here.target_answers()
    here.target_answers()
    assert len(here.session.answer.output) == 2
    here.draft_answers()
    hint = sent_extensions(here)[-1].hint
    assert hint is not None
    assert (hint.position, hint.draft_tokens) == (5, tuple(here.truth[5:7])), "what is left of it"
    here.target_answers()
    assert len(here.session.answer.output) == 5, "its last two, and the target's own"
    assert max(here.accepted_counts) == 2


def test_a_late_proposal_is_cancelled_and_requested_again() -> None:
    here = world(k=2)
    before = here.extensions
    here.target_answers()
    assert end_of(proposing(here)) == 3
    here.target_answers()
    assert here.session.stats.cancelled == 1
    assert end_of(proposing(here)) == 5
    assert here.extensions == before, "the target knows that one is due"


def test_after_an_empty_proposal_the_next_request_waits_for_a_verdict() -> None:
    here = world()
    here.draft_answers(lie="nothing")
    assert "draft" not in here.waiting
    assert [message.hint_due for message in sent_extensions(here)] == [False]
    here.target_answers()
    assert "draft" in here.waiting


def test_empty_proposals_send_no_messages_to_the_target() -> None:
    here = world(length=100)
    here.draft_answers(lie="nothing")
    before = here.extensions
    for _ in range(32):
        here.target_answers()
        here.draft_answers(lie="nothing")
        here.store()
        here.take()
    assert here.extensions - before <= 32 // 8, "but for its credit"
    here.target_answers()
    here.draft_answers()
    assert sent_extensions(here)[-1].hint is not None
    assert sent_extensions(here)[-1].hint_due, "from then on one is due again"


def test_a_failed_draft_ends_the_wait_of_the_target() -> None:
    here = world(draft_cooldown_ns=1000 * MS)
    here.draft_answers(fail=True)
    assert [message.hint_due for message in sent_extensions(here)] == [False]
    sent = here.extensions
    for _ in range(10):
        here.target_answers()
    assert here.extensions == sent, "and plain decoding goes on without a word"
    assert "draft" not in here.waiting


def test_a_verdict_may_use_a_replaced_hint() -> None:
    here = world()
    here.draft_answers()
    while here.to_target:
        here.deliver()
    here.target_passes(at_most=2)
    here.deliver_answer()
    here.target_passes(at_most=1)
    here.draft_answers()
    here.deliver_answer()
    assert not here.over
    here.run_to_end()
    assert here.seen == here.truth[3:]


def test_tokens_after_a_stop_string_are_dropped() -> None:
    truth = World(spec(k=0, stop_token_ids=ENDLESS), SessionLimits()).truth
    text = letters(truth[3:])
    stop = text[4:7]
    here = World(spec(k=0, stop_token_ids=ENDLESS, stop_strings=(stop,)), SessionLimits())
    here.deliver()
    for _ in range(20):
        here.target_passes()
    surplus = len(here.answers)
    here.check = lambda: None  # type: ignore[method-assign]  # the truth goes on, the answer does not
    while not any(isinstance(message, ev.CancelVerify) for message in here.to_target):
        here.deliver_answer()
    assert 0 < len(here.answers) < surplus
    output = list(here.session.answer.output)
    while here.answers:
        here.deliver_answer()
    assert here.session.answer.output == output
    while not here.over:
        here.store()
    assert here.end is not None
    assert here.end.error is None
    assert here.seen_text == text[: text.index(stop)]


def test_a_preempted_session_continues_from_its_cached_prefix() -> None:
    here = world()
    for _ in range(3):
        here.target_answers()
    here.target_preempts(keep=4)
    here.deliver_answer()
    [*_, again] = here.to_target
    assert isinstance(again, ev.Verify)
    assert again.slice.start == 4
    here.run_to_end()
    assert here.seen == here.truth[3:]


def test_a_retry_sends_the_rest_of_the_hint() -> None:
    here = world()
    here.draft_answers()
    here.deliver()
    here.target_passes()
    here.target_preempts(keep=3)
    here.deliver_answer()
    here.deliver_answer()
    [*_, again] = here.to_target
    assert isinstance(again, ev.Verify)
    assert len(again.draft_tokens) == 3


@pytest.mark.parametrize("how", ["deadline", "store", "fenced"])
def test_an_early_end_cancels_the_verify_first(how: str) -> None:
    here = world()
    here.target_answers()
    here.interrupt(how)
    assert here.over
    assert isinstance(here.to_target[-1], ev.CancelVerify)


def test_only_an_open_verify_is_cancelled() -> None:
    here = world(k=0, length=8)
    here.run_to_end()
    assert not any(isinstance(message, ev.CancelVerify) for message in here.to_target)


def test_draining_cancels_the_verify_at_the_next_verdict() -> None:
    here = world(k=0)
    here.deliver()
    here.target_passes()
    here.target_passes()
    here.interrupt("drain")
    assert here.open_request is not None
    here.deliver_answer()
    assert isinstance(here.to_target[-1], ev.CancelVerify)
    here.store()
    assert here.over
    assert len(here.seen) == 1


def verdict(here: World, **changes: object) -> ev.Verified:
    first = true_id([1, 2, 3])
    fields: dict[str, object] = {
        "request_id": here.open_request,
        "position": 3,
        "tokens": (first,),
        "accepted": 0,
        "verified": 0,
        "cache_len": 3,
        "fingerprint": "f",
        "logprobs": (PositionLogprobs(0.0),),
        "more": True,
        **changes,
    }
    return ev.Verified(**fields)  # type: ignore[arg-type]  # the fields of the test's own making


@pytest.mark.parametrize(
    "wrong",
    [
        {"position": 4},
        {"tokens": (1,) * 5, "accepted": 4, "verified": 4},
        {"tokens": ((true_id([1, 2, 3]) + 1) % STOP_ID,), "accepted": 1, "verified": 1},
        {"verified": 5},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_verdict_on_unhinted_tokens_is_an_internal_error(wrong: dict[str, object]) -> None:
    here = world()
    here.draft_answers()
    here.send(verdict(here, **wrong))
    assert here.end is not None
    assert isinstance(here.end.error, Broken)


def test_more_at_the_limit_is_an_internal_error() -> None:
    here = world(k=0, window=2, credit=1)
    here.send(verdict(here))
    assert not here.over
    second = true_id([1, 2, 3, true_id([1, 2, 3])])
    here.send(verdict(here, position=4, tokens=(second,)))
    assert here.end is not None
    assert isinstance(here.end.error, Broken)


def test_a_stale_verdict_is_dropped() -> None:
    here = world()
    here.target_answers()
    old = here.open_request
    here.target_fails()
    here.deliver_answer()
    output = list(here.session.answer.output)
    here.send(verdict(here, request_id=old, position=4))
    assert here.session.answer.output == output
    here.run_to_end()
    assert here.seen == here.truth[3:]


def test_each_verdict_ends_a_round() -> None:
    here = world(length=20)
    here.run_to_end()
    stats = here.session.stats
    assert stats.rounds == len(stats.orchestration_ns)
    assert stats.accepted + stats.rounds >= 20
    assert 0 < stats.accepted <= stats.verified <= stats.drafted
    assert stats.round_ns == stats.verify_ns
    assert 0 < stats.draft_ns <= stats.round_ns


def test_a_round_for_which_nothing_is_requested_has_no_k() -> None:
    here = world(length=6)
    here.run_to_end()
    assert [done.k for done in here.rounds] == [4, 0], "one token is left"


def test_without_credit_no_hint_follows_a_request() -> None:
    here = world(length=40, credit=0)
    here.run_to_end()
    assert here.seen == here.truth[3:]
    assert here.extensions == 0


def test_the_last_credit_covers_the_rest_of_the_answer() -> None:
    here = world(k=0, credit=32, length=40)
    here.run_to_end()
    assert here.verifies == 1
    assert here.extensions == 1


def test_a_request_says_whether_a_draft_works_for_the_session() -> None:
    def said(here: World) -> list[bool]:
        return [message.is_drafting for message in here.to_target if isinstance(message, ev.Verify)]

    assert said(world(k=0)) == [False]
    assert said(world(k=4)) == [True]
    here = world(k=4, credit=0)
    here.draft_answers(fail=True)
    assert said(here) == [False]

"""A target that goes on unasked (design: "Credit"): what it is told, and what late, wrong or no hints do."""

from __future__ import annotations

import pytest

from galley.core.errors import Broken
from galley.core.records import PositionLogprobs
from galley.core.session import events as ev
from galley.core.session.machine import SessionLimits
from tests.fakes.session_world import MS, STOP_TOKEN, World, decode, spec, true_next

ENDLESS = frozenset[int]()


def world(k: int = 4, credit: int = 32, length: int = 57, **limits: int) -> World:
    return World(
        spec(k=k, stop_token_ids=ENDLESS, max_position=3 + length), SessionLimits(credit=credit, **limits)
    )


def told(here: World) -> list[ev.ExtendVerify]:
    return [message for message in here.to_target if isinstance(message, ev.ExtendVerify)]


def test_plain_decoding_is_asked_for_once_and_pays_no_message_per_token() -> None:
    here = world(k=0, credit=32, length=500, buffer=1000)
    here.run_to_end()
    assert here.seen == here.truth[3:]
    assert here.asked == 1
    assert here.extensions <= 500 // 8


def test_the_target_never_runs_dry_while_half_a_credit_of_messages_is_on_the_way() -> None:
    here = world(k=0, credit=32, length=300)
    here.deliver()
    while here.item is not None and not here.over:
        here.target_passes()
        if len(here.answers) > 8:  # the wire and the gateway lag eight tokens behind
            here.hear()
            here.store()
            here.take()
            while here.to_target:
                here.deliver()
    assert here.asked == 1


def test_the_first_item_goes_at_once_and_says_that_a_hint_is_due() -> None:
    here = world()
    [asked] = here.to_target
    assert isinstance(asked, ev.Verify)
    assert asked.hint_due
    assert asked.draft_tokens == ()
    assert "draft" in here.waiting
    here.draft_answers()
    [extension] = told(here)
    assert extension.hint is not None
    assert len(extension.hint.draft_tokens) == 4
    assert extension.hint_due, "another will be, as soon as this one has its verdict"


def test_a_round_takes_one_message_to_the_target() -> None:
    """It knows that the next hint is due before it has to choose between waiting and going on.

    While too few tokens are ready, there may be two.
    """
    here = world(length=100)
    here.run_to_end()
    assert here.seen == here.truth[3:]
    assert here.asked == 1
    assert here.extensions <= 1.5 * here.session.stats.rounds


def proposing(here: World) -> ev.Propose:
    asked = here.waiting["draft"]
    assert isinstance(asked, ev.Propose)
    return asked


def end_of(asked: ev.Propose) -> int:
    return asked.slice.start + len(asked.slice.tokens)


def test_while_the_target_verifies_the_draft_goes_on_from_its_own_guesses() -> None:
    here = world()
    here.draft_answers()
    asked = proposing(here)
    assert (end_of(asked), asked.ahead) == (7, 4)
    assert asked.slice.tokens[-4:] == tuple(here.truth[3:7])
    here.draft_answers()
    here.target_answers()
    assert len(here.session.answer.output) == 5
    here.target_answers()
    assert len(here.session.answer.output) == 9, "the next pass has draft tokens as soon as this one ends"
    assert here.session.stats.accepted == 7


def test_what_goes_on_from_a_refused_guess_is_given_up_and_drafted_anew() -> None:
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


def test_what_was_asked_ahead_is_still_good_when_all_guesses_came_true() -> None:
    here = world()
    here.draft_answers()
    before = proposing(here)
    here.target_answers()
    assert proposing(here).request_id == before.request_id
    here.draft_answers()
    assert here.session.stats.cancelled == 0
    hint = told(here)[-1].hint
    assert hint is not None
    assert hint.position == 8
    assert hint.draft_tokens == tuple(here.truth[8 : 8 + len(hint.draft_tokens)]), (
        "its first came true meanwhile"
    )


def test_the_target_is_told_that_no_hint_will_come_where_none_is_worth_drafting() -> None:
    here = world(length=7)
    here.draft_answers()
    here.target_answers()
    here.draft_answers()
    assert here.to_target != []
    here = world(length=6)
    here.draft_answers()
    here.target_answers()
    assert "draft" not in here.waiting, "one token is left"
    assert [message.hint_due for message in told(here)] == [False]


def test_a_late_hint_keeps_its_worth() -> None:
    here = world()
    here.target_answers()
    here.target_answers()
    assert len(here.session.answer.output) == 2
    here.draft_answers()
    hint = told(here)[-1].hint
    assert hint is not None
    assert (hint.position, hint.draft_tokens) == (5, tuple(here.truth[5:7])), "what is left of it"
    here.target_answers()
    assert len(here.session.answer.output) == 5, "its last two, and the target's own"
    assert max(here.accepted_counts) == 2


def test_a_proposal_that_would_come_too_late_is_given_up_and_the_next_asked_for() -> None:
    here = world(k=2)
    before = here.extensions
    here.target_answers()
    assert end_of(proposing(here)) == 3
    here.target_answers()
    assert here.session.stats.cancelled == 1
    assert end_of(proposing(here)) == 5
    assert here.extensions == before, "that one is due, the target knows"


def test_a_draft_with_nothing_to_say_is_asked_again_only_after_a_verdict() -> None:
    here = world()
    here.draft_answers(lie="nothing")
    assert "draft" not in here.waiting
    assert [message.hint_due for message in told(here)] == [False]
    here.target_answers()
    assert "draft" in here.waiting


def test_a_draft_that_keeps_saying_nothing_costs_the_target_no_message_per_token() -> None:
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
    assert told(here)[-1].hint is not None
    assert told(here)[-1].hint_due, "from then on it is waited for again"


def test_a_draft_that_fails_does_not_let_the_target_wait_for_it() -> None:
    here = world(draft_cooldown_ns=1000 * MS)
    here.draft_answers(fail=True)
    assert [message.hint_due for message in told(here)] == [False]
    sent = here.extensions
    for _ in range(10):
        here.target_answers()
    assert here.extensions == sent, "and plain decoding goes on without a word"
    assert "draft" not in here.waiting


def test_a_hint_after_others_replaces_them_but_a_verdict_of_the_one_before_is_no_fault() -> None:
    here = world()
    here.draft_answers()
    while here.to_target:
        here.deliver()
    here.target_passes(at_most=2)
    here.hear()
    here.target_passes(at_most=1)  # of what is left of the hint, before the next has come
    here.draft_answers()
    here.hear()
    assert not here.over
    here.run_to_end()
    assert here.seen == here.truth[3:]


def test_what_comes_after_a_stop_string_is_given_up_and_dropped() -> None:
    truth = World(spec(k=0, stop_token_ids=ENDLESS), SessionLimits()).truth
    text = decode(truth[3:])
    stop = text[4:7]
    here = World(spec(k=0, stop_token_ids=ENDLESS, stop_strings=(stop,)), SessionLimits())
    here.deliver()
    for _ in range(20):
        here.target_passes()
    surplus = len(here.answers)
    here.check = lambda: None  # type: ignore[method-assign]  # the truth goes on, the answer does not
    while not any(isinstance(message, ev.CancelVerify) for message in here.to_target):
        here.hear()
    assert 0 < len(here.answers) < surplus
    output = list(here.session.answer.output)
    while here.answers:
        here.hear()
    assert here.session.answer.output == output
    while not here.over:
        here.store()
    assert here.end is not None
    assert here.end.error is None
    assert here.seen_text == text[: text.index(stop)]


def test_a_preempted_session_goes_on_from_what_is_left_of_its_cache() -> None:
    here = world()
    for _ in range(3):
        here.target_answers()
    here.target_preempts(keep=4)
    here.hear()
    [*_, again] = here.to_target
    assert isinstance(again, ev.Verify)
    assert again.slice.start == 4
    here.run_to_end()
    assert here.seen == here.truth[3:]


def test_a_retry_takes_what_is_left_of_the_last_hint_along() -> None:
    here = world()
    here.draft_answers()
    here.deliver()  # the item, and not yet the hint
    here.target_passes()
    here.target_preempts(keep=3)
    here.hear()
    here.hear()
    [*_, again] = here.to_target
    assert isinstance(again, ev.Verify)
    assert len(again.draft_tokens) == 3


@pytest.mark.parametrize("how", ["deadline", "store", "fenced"])
def test_a_stream_that_ends_early_gives_its_item_up_first(how: str) -> None:
    here = world()
    here.target_answers()
    here.interrupt(how)
    assert here.over
    assert isinstance(here.to_target[-1], ev.CancelVerify)


def test_nothing_is_given_up_that_does_not_stand() -> None:
    here = world(k=0, length=8)
    here.run_to_end()
    assert not any(isinstance(message, ev.CancelVerify) for message in here.to_target)


def test_draining_gives_up_the_item_at_the_next_verdict() -> None:
    here = world(k=0)
    here.deliver()
    here.target_passes()
    here.target_passes()
    here.interrupt("drain")
    assert here.stands is not None
    here.hear()
    assert isinstance(here.to_target[-1], ev.CancelVerify)
    here.store()
    assert here.over
    assert len(here.seen) == 1


def verdict(here: World, **changes: object) -> ev.Verified:
    first = true_next([1, 2, 3])
    fields: dict[str, object] = {
        "request_id": here.stands,
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
        {"tokens": ((true_next([1, 2, 3]) + 1) % STOP_TOKEN,), "accepted": 1, "verified": 1},
        {"verified": 5},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_verdict_of_what_was_not_hinted_is_our_fault(wrong: dict[str, object]) -> None:
    here = world()
    here.draft_answers()
    here.tell(verdict(here, **wrong))
    assert here.end is not None
    assert isinstance(here.end.error, Broken)


def test_a_verdict_at_the_limit_that_promises_more_is_our_fault() -> None:
    here = world(k=0, window=2, credit=1)
    here.tell(verdict(here))
    assert not here.over
    second = true_next([1, 2, 3, true_next([1, 2, 3])])
    here.tell(verdict(here, position=4, tokens=(second,)))
    assert here.end is not None
    assert isinstance(here.end.error, Broken)


def test_a_verdict_of_an_item_that_is_over_is_dropped() -> None:
    here = world()
    here.target_answers()
    old = here.stands
    here.target_fails()
    here.hear()
    output = list(here.session.answer.output)
    here.tell(verdict(here, request_id=old, position=4))
    assert here.session.answer.output == output
    here.run_to_end()
    assert here.seen == here.truth[3:]


def test_each_verdict_is_a_round_whose_waits_are_counted_from_the_one_before() -> None:
    here = world(length=20)
    here.run_to_end()
    stats = here.session.stats
    assert stats.rounds == len(stats.orchestration_ns)
    assert stats.accepted + stats.rounds >= 20
    assert 0 < stats.accepted <= stats.verified <= stats.drafted
    assert stats.round_ns == stats.verify_ns
    assert 0 < stats.draft_ns <= stats.round_ns


def test_the_last_credit_reaches_to_the_end_of_the_answer() -> None:
    here = world(k=0, credit=32, length=40)
    here.run_to_end()
    assert here.asked == 1
    assert here.extensions == 1

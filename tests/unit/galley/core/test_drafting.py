"""What is left of a proposal after a wrong token: nothing, unless drafts have proved to recover."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from galley.core.answer.answer import Answer, SessionSpec
from galley.core.content import prefix_hash
from galley.core.hints import Hint
from galley.core.names import GRAMMAR
from galley.core.records import TokenRecord
from galley.core.sampling_params import SamplingParams
from galley.core.session import events as ev
from galley.core.session.drafting import Drafting, PendingProposal, joined, remaining, valid_prefix
from galley.core.session.sources import LocalProposal

PROMPT = (1, 2, 3)


@dataclass
class Observer:
    can_recover: bool
    seen: list[bool] = field(default_factory=list)
    recoveries: list[bool] = field(default_factory=list)
    late: int = 0
    given_up: int = 0

    def record_given_up(self, _elapsed_ns: int) -> None:
        self.given_up += 1

    def record_late(self) -> None:
        self.late += 1

    def record_token(self, right: bool) -> None:
        self.seen.append(right)

    def record_recovery(self, right: bool) -> None:
        self.recoveries.append(right)


def drafting(observer: Any) -> tuple[Drafting, Answer]:
    here = Drafting(1, 1, observer)
    answer = Answer(SessionSpec("s", PROMPT, SamplingParams(), 100, 100), lambda tokens: "x" * len(tokens))
    here.hint = Hint(3, prefix_hash(PROMPT), (4, 5, 6, 7, 8, 9), (0.9, 0.8, 0.7, 0.6, 0.5, 0.4))
    here.cache_len = 9
    guessed = prefix_hash((*PROMPT, 4, 5, 6, 7, 8, 9))
    here.pending = PendingProposal(1, 9, guessed, 4, 0)
    return here, answer


def confirm(here: Drafting, answer: Answer, *tokens: int) -> PendingProposal | None:
    for token in tokens:
        answer.append(token, TokenRecord(from_draft=False))
    return here.confirm(answer.tokens, 0)


def proposed(pending: PendingProposal, *tokens: int) -> ev.Proposed:
    return ev.Proposed(pending.request_id, pending.position, pending.prefix_hash, tokens, cache_len=13)


def offered(here: Drafting, answer: Answer) -> tuple[int, ...]:
    return () if here.hint is None else remaining(here.hint, answer.tokens).draft_tokens


def test_a_wrong_token_ends_a_hint_and_the_request_after_it() -> None:
    observer = Observer(can_recover=False)
    here, answer = drafting(observer)
    given_up = confirm(here, answer, 4, 55)
    assert given_up is not None
    assert (here.hint, here.pending, here.cache_len) == (None, None, 4)
    assert observer.seen == [True, False]
    assert observer.given_up == 1


def test_each_token_of_a_hint_is_recorded_once() -> None:
    observer = Observer(can_recover=False)
    here, answer = drafting(observer)
    for token in (4, 5, 6):
        confirm(here, answer, token)
        assert offered(here, answer) == tuple(range(token + 1, 10))
    assert observer.seen == [True, True, True]


def test_a_draft_may_miss_three_times_in_a_row() -> None:
    here, answer = drafting(Observer(can_recover=False))
    pending = here.pending
    missed = ev.CacheMissed(1, 2, prefix_hash(PROMPT[:2]))
    for _ in range(3):
        here.pending = pending
        assert here.miss(missed, answer) == pending
        assert here.cache_len == 2
    here.pending = pending
    assert here.miss(missed, answer) is None


@pytest.mark.parametrize(
    ("tokens", "valid"), [((0, 7), (0, 7)), ((3, 8, 3), (3,)), ((-1,), ()), ((3, -1), (3,)), ((), ())]
)
def test_draft_tokens_of_another_vocabulary_end_a_proposal(
    tokens: tuple[int, ...], valid: tuple[int, ...]
) -> None:
    assert valid_prefix(tokens, vocab_size=8) == valid


def test_where_drafts_recover_the_rest_of_a_hint_stays() -> None:
    observer = Observer(can_recover=True)
    here, answer = drafting(observer)
    assert confirm(here, answer, 4, 55) is None
    assert here.hint is not None
    assert remaining(here.hint, answer.tokens).draft_tokens == (6, 7, 8, 9)
    assert here.pending is not None, "what goes on from there may be right as well"
    assert here.cache_len == 4, "but the draft's cache holds the wrong token"
    assert here.receive(proposed(here.pending, 10, 11, 12, 13), answer, 0.5, 0).valid == 4
    assert remaining(here.hint, answer.tokens).draft_tokens == (6, 7, 8, 9, 10, 11, 12, 13)
    assert here.cache_len == 4


def test_recovery_is_recorded_for_dropped_hints_too() -> None:
    observer = Observer(can_recover=False)
    here, answer = drafting(observer)
    confirm(here, answer, 4, 55)
    confirm(here, answer, 6)
    assert observer.recoveries == [True]
    observer = Observer(can_recover=True)
    here, answer = drafting(observer)
    confirm(here, answer, 4, 55)
    confirm(here, answer, 66)
    assert observer.recoveries == [False]
    assert observer.seen == [True, False, False]


def test_an_exhausted_hint_is_dropped_but_not_the_request_after_it() -> None:
    observer = Observer(can_recover=False)
    here, answer = drafting(observer)
    pending = here.pending
    assert pending is not None
    assert confirm(here, answer, 4, 5, 6, 7, 8, 9, 10) is None
    assert (here.hint, here.pending) == (None, pending)
    here.receive(proposed(pending, 10, 11, 12, 13), answer, 0.5, 0)
    assert offered(here, answer) == (11, 12, 13)
    assert confirm(here, answer, 11, 12, 13, 14) is None
    assert offered(here, answer) == ()


def test_the_time_of_a_hint_is_that_of_its_first_tokens() -> None:
    here, answer = drafting(Observer(can_recover=False))
    assert here.pending is not None
    here.receive(proposed(here.pending, 10), answer, 0.5, 7)
    assert offered(here, answer) == (4, 5, 6, 7, 8, 9, 10)
    assert here.hint_since_ns == 0
    here.hint = None
    here.pending = PendingProposal(2, 3, prefix_hash(PROMPT), 4, 0)
    here.receive(proposed(here.pending, 4), answer, 0.5, 8)
    assert here.hint_since_ns == 8


def test_a_request_for_confirmed_tokens_is_given_up() -> None:
    observer = Observer(can_recover=True)
    here, answer = drafting(observer)
    given_up = confirm(here, answer, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)
    assert given_up is not None
    assert here.pending is None
    assert observer.late == 1


def overlapping(observer: Observer, *own: int) -> tuple[Drafting, Answer, PendingProposal]:
    """Return a session whose own sources propose for the position of a pending proposal."""
    here, answer = drafting(observer)
    here.hint, here.cache_len = None, 3
    here.pending = pending = PendingProposal(1, 3, prefix_hash(PROMPT), 4, 0)
    here.extend(LocalProposal(GRAMMAR, own, (1.0,) * len(own)), answer, 0)
    return here, answer, pending


def test_a_proposal_adds_what_goes_beyond_the_tokens_of_the_session() -> None:
    here, answer, pending = overlapping(Observer(can_recover=False), 4, 5)
    assert here.receive(proposed(pending, 4, 5, 6, 7), answer, 0.5, 0)[:2] == (4, 2)
    assert offered(here, answer) == (4, 5, 6, 7)
    assert here.hint is not None
    assert [here.hint.is_local(index) for index in range(4)] == [True, True, False, False]
    assert here.cache_len == 13


def test_a_proposal_that_differs_from_the_tokens_of_the_session_adds_nothing() -> None:
    here, answer, pending = overlapping(Observer(can_recover=False), 4, 5)
    assert here.receive(proposed(pending, 4, 55, 6, 7), answer, 0.5, 0)[:2] == (4, 0)
    assert offered(here, answer) == (4, 5)
    assert here.cache_len == 4, "the draft's cache holds the other token"


def test_a_proposal_is_judged_by_the_tokens_that_are_confirmed() -> None:
    observer = Observer(can_recover=False)
    here, answer, pending = overlapping(observer, 4, 5, 6)
    confirm(here, answer, 4, 5)
    assert observer.seen == [], "the draft had no part in them"
    assert here.receive(proposed(pending, 4, 55, 6, 7), answer, 0.5, 0)[:2] == (4, 0)
    assert observer.seen == [True, False]
    assert offered(here, answer) == (6,)


def test_a_wrong_token_of_the_session_ends_its_hint_even_where_drafts_recover() -> None:
    observer = Observer(can_recover=True)
    here, answer, _ = overlapping(observer, 4, 5, 6)
    confirm(here, answer, 4, 55)
    assert here.hint is None
    confirm(here, answer, 6)
    assert observer.recoveries == []


def test_a_failed_draft_takes_its_own_tokens_along_and_no_others() -> None:
    here, answer, pending = overlapping(Observer(can_recover=False), 4, 5)
    here.receive(proposed(pending, 4, 5, 6, 7), answer, 0.5, 0)
    here.fail(0)
    assert offered(here, answer) == (4, 5)


def test_chances_of_a_hint_that_is_continued_are_those_of_all_its_tokens() -> None:
    first = Hint(3, prefix_hash(PROMPT), (4, 5), (0.5, 0.25))
    further = Hint(5, prefix_hash((*PROMPT, 4, 5)), (6, 7), (0.5, 0.25))
    both = joined(first, further)
    assert (both.position, both.draft_tokens) == (3, (4, 5, 6, 7))
    assert both.survival == (0.5, 0.25, 0.125, 0.0625)
    unknown = joined(Hint(3, prefix_hash(PROMPT), (4, 5)), further)
    assert unknown.draft_tokens == (4, 5, 6, 7)


def test_no_token_after_one_that_is_never_accepted_is_likely() -> None:
    assert Hint(3, prefix_hash(PROMPT), (4, 5), (0.0, 0.0)).chance(1) == 0.0

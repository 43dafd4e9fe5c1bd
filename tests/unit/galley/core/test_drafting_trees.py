"""What a session keeps of a tree of draft tokens, and what it takes of a proposal that is not trusted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from galley.core.answer.answer import Answer, SessionSpec
from galley.core.content import prefix_hash
from galley.core.hints import MAX_HINT_TOKENS, Hint
from galley.core.names import GRAMMAR
from galley.core.records import TokenRecord
from galley.core.sampling_params import SamplingParams
from galley.core.session import events as ev
from galley.core.session.drafting import Drafting, PendingProposal, joined
from galley.core.session.sources import LocalProposal

PROMPT = (1, 2, 3)
# The main path is 4 5 6. Beside 5 is 7, which 8 follows; beside 4 is 9.
TOKENS, PARENTS = (4, 5, 6, 7, 8, 9), (-1, 0, 1, 0, 3, -1)
SURVIVAL = (0.8, 0.6, 0.4, 0.2, 0.1, 0.05)


@dataclass
class Observer:
    can_recover: bool = False
    seen: list[tuple[int, int | None]] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)
    recoveries: list[bool] = field(default_factory=list)
    given_up: int = 0

    def record_given_up(self, _elapsed_ns: int) -> None:
        self.given_up += 1

    def record_token(self, right: bool) -> None:
        self.seen.append((1, 0 if right else None))

    def record_candidates(self, count: int, rank: int | None) -> None:
        self.seen.append((count, rank))

    def record_chain(self, count: int) -> None:
        self.chains.append(count)

    def record_recovery(self, right: bool) -> None:
        self.recoveries.append(right)


def drafting(observer: Any) -> tuple[Drafting, Answer, PendingProposal]:
    """Return a session with the tree above and a pending proposal that goes on from its main path."""
    here = Drafting(1, 1, observer)
    answer = Answer(SessionSpec("s", PROMPT, SamplingParams(), 400, 400), lambda tokens: "x" * len(tokens))
    here.hint = Hint(3, prefix_hash(PROMPT), TOKENS, SURVIVAL, ("model",) * 6, PARENTS)
    here.cache_len = 6
    here.pending = PendingProposal(1, 6, prefix_hash((*PROMPT, 4, 5, 6)), 4, 0, width=2)
    return here, answer, here.pending


def confirm(here: Drafting, answer: Answer, *tokens: int) -> PendingProposal | None:
    for token in tokens:
        answer.append(token, TokenRecord(from_draft=False))
    return here.confirm(answer.tokens, 0)


def proposed(
    pending: PendingProposal,
    tokens: tuple[int, ...],
    parents: tuple[int, ...] = (),
    survival: tuple[float, ...] = (),
) -> ev.Proposed:
    return ev.Proposed(
        pending.request_id,
        pending.position,
        pending.prefix_hash,
        tokens,
        cache_len=13,
        survival=survival,
        parents=parents,
    )


def asked(here: Drafting, width: int = 2, k: int = 8) -> PendingProposal:
    """Let a proposal be pending at the end of the prompt, without a hint."""
    here.hint = None
    here.pending = PendingProposal(1, 3, prefix_hash(PROMPT), k, 0, width)
    return here.pending


def test_the_part_below_a_confirmed_token_stays() -> None:
    observer = Observer()
    here, answer, pending = drafting(observer)
    assert confirm(here, answer, 4) is None
    tail = here.tail(answer.tokens)
    assert (tail.draft_tokens, tail.parents) == ((5, 6, 7, 8), (-1, 0, -1, 2))
    assert tail.survival == pytest.approx((0.75, 0.5, 0.25, 0.125))
    assert tail.sources == ("model",) * 4
    assert (here.pending, here.cache_len) == (pending, 6)
    assert observer.seen == [(2, 0)]


def test_off_the_main_path_the_request_after_it_is_given_up() -> None:
    observer = Observer(can_recover=True)
    here, answer, pending = drafting(observer)
    here.is_exhausted = True
    assert confirm(here, answer, 4, 7) == pending
    tail = here.tail(answer.tokens)
    assert (tail.draft_tokens, tail.parents, tail.survival) == ((8,), (), (0.5,))
    assert here.cache_len == 4, "the draft's cache holds the main path"
    assert not here.is_exhausted, "it had no more for another end"
    assert observer.seen == [(2, 0), (2, 1)]


@pytest.mark.parametrize("tokens", [(4, 77), (4, 7, 88), (99,), (9, 99)])
def test_a_token_that_no_node_has_ends_a_tree(tokens: tuple[int, ...]) -> None:
    observer = Observer()
    here, answer, pending = drafting(observer)
    assert confirm(here, answer, *tokens) == pending
    assert here.hint is None
    assert observer.seen[0] == (2, {4: 0, 9: 1}.get(tokens[0]))


def test_where_drafts_recover_the_main_path_stays_and_no_other() -> None:
    here, answer, _ = drafting(Observer(can_recover=True))
    assert confirm(here, answer, 4, 77) is None
    tail = here.tail(answer.tokens)
    assert (tail.draft_tokens, tail.parents, tail.sources) == ((6,), (), ("model",))
    assert tail.survival == pytest.approx((0.4 / 0.6,))
    assert here.pending is not None
    assert here.cache_len == 4


def test_after_the_last_node_beside_the_main_path_it_may_recover_too() -> None:
    observer = Observer(can_recover=True)
    here, answer, _ = drafting(observer)
    assert confirm(here, answer, 9) is None
    assert here.tail(answer.tokens).draft_tokens == (5, 6)
    confirm(here, answer, 5)
    assert observer.recoveries == [True]


def test_at_the_end_of_the_main_path_the_request_after_it_stays() -> None:
    here, answer, pending = drafting(Observer())
    assert confirm(here, answer, 4, 5, 6, 10) is None
    assert (here.hint, here.pending) == (None, pending)
    here.receive(proposed(pending, (10, 11, 12), (-1, 0, 0), (0.9, 0.5, 0.3)), answer, 0.5, 0)
    tail = here.tail(answer.tokens)
    assert (tail.draft_tokens, tail.parents) == ((11, 12), (-1, -1))


def test_a_proposal_continues_at_the_end_of_the_main_path() -> None:
    here, answer, pending = drafting(Observer())
    event = proposed(pending, (10, 11, 12), (-1, -1, 0), (0.6, 0.5, 0.1))
    assert here.receive(event, answer, 0.5, 0)[:2] == (3, 3)
    assert here.hint is not None
    assert here.hint.draft_tokens == (4, 5, 6, 10, 7, 11, 8, 9, 12)
    assert here.hint.parents == (-1, 0, 1, 2, 0, 2, 4, -1, 3)
    assert here.hint.survival == pytest.approx((0.8, 0.6, 0.4, 0.24, 0.2, 0.2, 0.1, 0.05, 0.04))
    assert here.hint.end == 8
    request = here.request(2, answer, here.tail(answer.tokens), 4, 0, width=3)
    assert (request.slice.tokens[-5:], request.ahead, request.width) == ((4, 5, 6, 10, 12), 5, 3)


def test_a_tree_may_follow_an_empty_proposal() -> None:
    here, answer, _ = drafting(Observer())
    pending = asked(here)
    here.receive(proposed(pending, ()), answer, 0.5, 0)
    here.pending = pending
    assert here.receive(proposed(pending, TOKENS, PARENTS, SURVIVAL), answer, 0.5, 0)[:2] == (6, 6)
    assert here.tail(answer.tokens).parents == PARENTS


def test_a_tree_that_is_too_large_keeps_its_best_nodes() -> None:
    count = MAX_HINT_TOKENS - 4
    falling = tuple(1.0 - i / (2 * count) for i in range(count))
    chain = Hint(3, b"", tuple(range(4, 4 + count)), falling, ("model",) * count)
    tree = Hint(3 + count, b"", (1, 2) * 4, (1.0, 0.9) * 4, ("ngram",) * 8, (-1, -1, 0, 0, 2, 2, 4, 4))
    whole = joined(chain, tree)
    assert len(whole.draft_tokens) == MAX_HINT_TOKENS
    assert whole.draft_tokens[-4:] == (1, 1, 1, 1), "those beside them are less likely"
    assert whole.parents == ()


UNTRUSTED = {
    "a tree": ((4, 5, 6), (-1, -1, 0), (0.6, 0.3, 0.2), (4, 5, 6), (-1, -1, 0)),
    "not best first": ((5, 4, 6), (-1, -1, 1), (0.3, 0.6, 0.5), (4, 6, 5), (-1, 0, -1)),
    "likelier than its parent": ((4, 5, 6), (-1, 0, -1), (0.4, 0.9, 0.3), (4, 5, 6), (-1, 0, -1)),
    "its own parent": ((4, 5, 6), (-1, 1, 0), (0.6, 0.3, 0.2), (4,), ()),
    "a later parent": ((4, 5, 6), (-1, 2, -1), (0.6, 0.3, 0.2), (4,), ()),
    "before the root": ((4, 5, 6), (-1, -2, 0), (0.6, 0.3, 0.2), (4,), ()),
    "twins": ((4, 5, 5), (-1, 0, 0), (0.6, 0.3, 0.2), (4, 5), ()),
    "too few parents": ((4, 5, 6), (-1, 0), (0.6, 0.3, 0.2), (), ()),
    "too many parents": ((4, 5), (-1, 0, 0), (0.6, 0.3), (), ()),
    "wider than requested": ((4, 5, 6, 7), (-1, -1, -1, 0), (0.4, 0.3, 0.2, 0.1), (4, 5), (-1, -1)),
    "more than requested": (
        (4, 5, *range(6, 16)),
        (-1,) * 2 + (0,) * 10,
        (0.1,) * 12,
        (4, 5, 6, 7),
        (-1, -1, 0, 0),
    ),
    "another vocabulary": ((4, 5, 400, 6), (-1, -1, 0, 0), (0.4, 0.3, 0.2, 0.1), (4, 5), (-1, -1)),
    "no survival": ((4, 5, 6), (-1, -1, 0), (), (4, 6), ()),
    "too little survival": ((4, 5, 6), (-1, -1, 0), (0.6, 0.3), (4, 6), ()),
    "no number": ((4, 5, 6), (-1, -1, 0), (0.6, math.nan, 0.2), (4, 6), ()),
    "no chance": ((4, 5, 6), (-1, -1, 0), (1.6, 0.3, 0.2), (4, 6), ()),
}


@pytest.mark.parametrize(
    ("tokens", "parents", "survival", "taken", "tree"), UNTRUSTED.values(), ids=UNTRUSTED
)
def test_of_a_proposal_the_valid_part_is_taken(
    tokens: tuple[int, ...],
    parents: tuple[int, ...],
    survival: tuple[float, ...],
    taken: tuple[int, ...],
    tree: tuple[int, ...],
) -> None:
    here, answer, _ = drafting(Observer())
    event = proposed(asked(here), tokens, parents, survival)
    assert here.receive(event, answer, 0.5, 0).valid == len(taken)
    tail = here.tail(answer.tokens)
    assert (tail.draft_tokens, tail.parents) == (taken, tree)
    assert list(tail.survival) == sorted(tail.survival, reverse=True)
    assert len(tail.survival) == len(tail.sources) == len(taken)


def test_a_chain_where_a_tree_was_requested_is_recorded() -> None:
    observer = Observer()
    here, answer, _ = drafting(observer)
    here.receive(proposed(asked(here), (4, 5, 6)), answer, 0.5, 0)
    here.receive(proposed(asked(here), (4, 5), (-1, -1), (0.5, 0.4)), answer, 0.5, 0)
    here.receive(proposed(asked(here), ()), answer, 0.5, 0)
    here.receive(proposed(asked(here, width=1), (4, 5, 6)), answer, 0.5, 0)
    assert observer.chains == [3]


def test_a_chain_is_requested_and_a_tree_comes() -> None:
    here, answer, _ = drafting(Observer())
    here.receive(proposed(asked(here, width=1), TOKENS, PARENTS, SURVIVAL), answer, 0.5, 0)
    assert here.tail(answer.tokens).draft_tokens == (4, 5, 6)


def test_a_candidate_beside_the_main_path_may_agree_with_a_forced_token() -> None:
    observer = Observer()
    here, answer, _ = drafting(observer)
    pending = asked(here)
    here.extend(LocalProposal(GRAMMAR, (9,), (1.0,)), answer, 0)
    event = proposed(pending, (4, 9, 5, 6, 7), (-1, -1, 1, 1, 0), (0.4, 0.3, 0.2, 0.1, 0.1))
    assert here.receive(event, answer, 0.5, 0)[:2] == (5, 2)
    tail = here.tail(answer.tokens)
    assert (tail.draft_tokens, tail.parents) == ((9, 5, 6), (-1, 0, 0))
    assert tail.sources[0] == GRAMMAR
    assert here.cache_len == 3
    confirm(here, answer, 9)
    assert observer.seen == [], "the draft had no part in it"
    confirm(here, answer, 6)
    assert observer.seen == [(2, 1)]


def test_a_late_tree_is_judged_by_the_tokens_that_are_confirmed() -> None:
    observer = Observer()
    here, answer, _ = drafting(observer)
    pending = asked(here)
    assert confirm(here, answer, 4, 7) is None
    here.receive(proposed(pending, TOKENS, PARENTS, SURVIVAL), answer, 0.5, 0)
    assert here.tail(answer.tokens).draft_tokens == (8,)
    assert observer.seen == [(2, 0), (2, 1)]


def test_a_failed_draft_takes_its_tree_along_but_no_tokens_of_the_session() -> None:
    here, answer, _ = drafting(Observer())
    pending = asked(here)
    here.extend(LocalProposal(GRAMMAR, (4,), (1.0,)), answer, 0)
    here.receive(proposed(pending, TOKENS, PARENTS, SURVIVAL), answer, 0.5, 0)
    assert here.tail(answer.tokens).parents
    here.fail(0)
    assert here.tail(answer.tokens).draft_tokens == (4,)

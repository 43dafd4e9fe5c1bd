"""Trees of draft tokens in the session machine: sent, verified, counted and checked."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from galley.core.errors import Broken
from galley.core.hints import HintTail
from galley.core.names import GRAMMAR
from galley.core.records import PositionLogprobs
from galley.core.session import events as ev
from galley.core.session.machine import SessionLimits
from tests.fakes.scripted_sources import scripted_sources
from tests.fakes.session_world import World, spec
from tests.fakes.truth import IDS

ENDLESS = frozenset[int]()
CREDITS = pytest.mark.parametrize("credit", [0, 32])


class Listed(World):
    """Its draft proposes a wrong token and beside it the right one, which two right ones follow."""

    def _tree(self, effect: ev.Propose, tokens: list[int]) -> HintTail:
        position = len(tokens)
        right = self.truth[position : position + 3]
        wrong = (right[0] + 1) % IDS
        return HintTail(
            (wrong, right[0], *right[1:]), (0.5, 0.4, 0.3, 0.2), parents=(-1, -1, 1, 2)[: 1 + len(right)]
        )


def listed(credit: int = 32, width: int = 2, length: int = 57) -> Listed:
    return Listed(
        spec(stop_token_ids=ENDLESS, width=width, max_position=3 + length), SessionLimits(credit=credit)
    )


@CREDITS
@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("prompt", [(0, 2, 3), (1, 2, 3)])
def test_trees_change_no_token(prompt: tuple[int, ...], width: int, credit: int) -> None:
    plain = World(spec(prompt=prompt, k=0), SessionLimits(credit=credit))
    here = World(spec(prompt=prompt, k=8, width=width), SessionLimits(credit=credit))
    plain.run_to_end()
    here.run_to_end()
    assert here.seen == plain.seen
    assert here.session.stats.accepted > 0


@CREDITS
def test_a_path_beside_the_main_one_is_accepted_and_counted(credit: int) -> None:
    here = listed(credit)
    here.draft_answers()
    here.target_answers()
    [done] = here.rounds
    assert (done.accepted, done.verdict.verified) == (3, 4)
    assert done.tree is not None
    assert (done.tree.depth, done.tree.verified_by_rank, done.tree.accepted_by_rank) == (3, (3, 1), (2, 1))
    here.store()
    assert [record.from_draft for record in here.records] == [True, True, True, False]
    here.run_to_end()
    assert here.seen == here.truth[3:]
    assert here.session.stats.accepted_by_rank[1] > 5


@CREDITS
def test_an_accepted_candidate_is_counted_by_its_rank(credit: int) -> None:
    here = listed(credit)
    here.draft_answers()
    while here.to_target:
        here.deliver()
    here.target_passes(at_most=2)
    here.deliver_answer()
    tree = here.rounds[0].tree
    assert tree is not None
    assert (tree.verified_by_rank, tree.accepted_by_rank) == ((1, 1), (0, 1))


def test_a_request_after_the_main_path_is_given_up_off_it() -> None:
    here = listed()
    here.draft_answers()
    ahead = here.waiting["draft"]
    assert isinstance(ahead, ev.Propose)
    assert ahead.ahead == 1, "it goes on from the wrong token, the likeliest"
    here.target_answers()
    assert here.session.stats.cancelled == 1
    again = here.waiting["draft"]
    assert isinstance(again, ev.Propose)
    assert (again.ahead, again.width) == (0, 2)
    assert again.slice.start <= 3, "the draft's cache is trusted up to where the paths part"


def test_nodes_are_rows_within_the_credit() -> None:
    """Check in World that no limit goes beyond the room; here, that trees of all sizes fit."""
    for buffer in range(1, 9):
        here = World(
            spec(k=8, width=3, stop_token_ids=ENDLESS), SessionLimits(credit=4, buffer=buffer, window=5)
        )
        here.run_to_end()
        assert here.seen == here.truth[3:]


@CREDITS
def test_after_a_target_without_trees_chains_are_requested(credit: int) -> None:
    here = listed(credit)
    here.draft_answers()
    while here.to_target:
        here.deliver()
    here.target_passes(at_most=1)
    answer = here.answers[0]
    assert isinstance(answer, ev.Verified)
    here.answers[0] = replace(answer, trees=False)
    here.deliver_answer()
    assert here.rounds[0].tree is None
    request = here.waiting["draft"]
    assert isinstance(request, ev.Propose)
    assert request.width == 1


def verdict(here: World, tokens: list[int], accepted: int, verified: int) -> ev.Verified:
    logprobs = tuple(PositionLogprobs(0.0) for _ in tokens)
    assert here.open_request is not None
    return ev.Verified(here.open_request, 3, tuple(tokens), accepted, verified, 3, "f", logprobs, more=True)


def test_a_verdict_may_follow_a_path_that_is_longer_than_the_main_one() -> None:
    here = listed()
    here.draft_answers()
    here.send(verdict(here, here.truth[3:7], 3, 4))
    assert not here.over


@pytest.mark.parametrize("wrong", ["a token of no node", "more nodes than sent", "a path too long"])
def test_a_verdict_on_nodes_that_were_not_sent_is_an_internal_error(wrong: str) -> None:
    here = listed()
    here.draft_answers()
    right = here.truth[3:8]
    match wrong:
        case "a token of no node":
            event = verdict(here, [right[0], (right[1] + 1) % IDS, right[2]], 2, 4)
        case "more nodes than sent":
            event = verdict(here, right[:3], 2, 5)
        case _:
            event = verdict(here, right, 4, 4)
    here.send(event)
    assert here.end is not None
    assert isinstance(here.end.error, Broken)


def test_a_verdict_on_the_nodes_that_a_grammar_leaves_is_counted() -> None:
    """The target drops nodes that a grammar forbids: here the first."""
    here = listed()
    here.draft_answers()
    here.send(verdict(here, here.truth[3:7], 3, 3))
    [done] = here.rounds
    assert (done.accepted, done.verdict.verified, done.tree) == (3, 3, None)


@CREDITS
@pytest.mark.parametrize("seed", range(4))
def test_trees_continue_what_the_session_proposes_itself(seed: int, credit: int) -> None:
    rng = random.Random(seed)
    forced = frozenset(rng.sample(range(57), 20))
    here = World(
        spec(k=8, width=3, stop_token_ids=ENDLESS),
        SessionLimits(credit=credit),
        sources=lambda output: scripted_sources(output, forced),
    )
    here.run_to_end()
    assert here.seen == here.truth[3:]
    assert here.session.stats.sources[GRAMMAR].accepted > 0
    assert len(here.session.stats.accepted_by_rank) > 1

"""How many candidates a session requests for a position: as many as are each worth a row."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from galley.core.answer.answer import SessionSpec
from galley.core.sampling_params import SamplingParams
from galley.core.session.draft_statistics import SharedStatistics
from galley.core.session.speculation import Speculation, best_survivals
from galley.core.trees import MAX_WIDTH

MS = 1_000_000
STEP_NS = 20 * MS


def session(shared: SharedStatistics, *, auto: bool = True, width: int = 0) -> Speculation:
    spec = SessionSpec("s", (1, 2, 3), SamplingParams(), 400, 1 << 16, k=16, auto=auto, width=width)
    return Speculation(spec, shared)


def measured(row_share: float, first: float, side: float, width: int = 0) -> Speculation:
    """Return a session that has seen such lists, and steps to which a row adds `row_share` of their time."""
    shared, chance = SharedStatistics(), random.Random(1)
    here = session(shared, width=width)
    for _ in range(400):
        right = [chance.random() < first, chance.random() < side, chance.random() < side]
        here.record_candidates(3, next((rank for rank, is_right in enumerate(right) if is_right), None))
        shared.record_step(STEP_NS, 1, round(row_share * STEP_NS), 1)
        here.record_proposal(4, 0, 2 * MS, MS, 1)
    return here


def requested_width(here: Speculation) -> int:
    assert here.tokens_to_draft(0, 1.0, 60, 0) > 0
    return here.width


def test_the_chance_of_further_candidates_is_learned() -> None:
    here = measured(0.004, first=0.5, side=0.4)
    workload = here.shared.for_workload("", "")
    assert workload.alpha == pytest.approx(0.5, abs=0.1)
    assert workload.side == pytest.approx(0.4, abs=0.1)


@pytest.mark.parametrize(
    ("row_share", "least", "most"), [(0.004, 5, MAX_WIDTH), (0.1, 2, 3), (0.3, 1, 1), (0.0, 8, 8)]
)
def test_the_width_follows_the_price_of_a_row(row_share: float, least: int, most: int) -> None:
    assert least <= requested_width(measured(row_share, first=0.5, side=0.4)) <= most


def test_useless_candidates_are_not_requested() -> None:
    assert requested_width(measured(0.02, first=0.5, side=0.0)) == 1


def test_useless_candidates_are_requested_again_in_time() -> None:
    here = measured(0.02, first=0.5, side=0.0)
    for count in range(400):
        if requested_width(here) > 1:
            break
        here.record_token(count % 2 == 0)
    assert 10 < count < 399


def test_auto_is_bounded_by_the_width_of_the_request() -> None:
    assert requested_width(measured(0.004, first=0.5, side=0.4, width=2)) == 2
    assert requested_width(measured(0.004, first=0.5, side=0.4, width=1)) == 1


def test_before_anything_is_measured_chains_are_requested() -> None:
    assert requested_width(session(SharedStatistics())) == 1


@pytest.mark.parametrize(("given", "width"), [(0, 1), (1, 1), (4, 4)])
def test_a_fixed_width_is_requested_as_given(given: int, width: int) -> None:
    assert requested_width(session(SharedStatistics(), auto=False, width=given)) == width


def test_a_target_that_takes_chains_alone_gets_chains() -> None:
    shared = SharedStatistics()
    here = session(shared, auto=False, width=4)
    here.record_target(trees=False)
    assert requested_width(here) == 1
    assert requested_width(session(shared, auto=False, width=4)) == 1, "sessions to come most likely too"
    here.record_target(trees=True)
    assert requested_width(here) == 4


def test_a_draft_that_answers_with_chains_is_asked_for_chains() -> None:
    here = measured(0.02, first=0.5, side=0.4)
    assert requested_width(here) > 1
    for _ in range(20):
        here.record_chain(8)
    assert requested_width(here) == 1, "after few proposals, because the answer may be short"


def test_a_chain_of_likely_tokens_is_no_sign_of_a_draft_without_trees() -> None:
    here = measured(0.02, first=0.95, side=0.4)
    before = here.statistics.side
    for _ in range(20):
        here.record_chain(8)
    assert here.statistics.side == before


def test_a_tree_is_requested_as_large_as_its_nodes_are_worth() -> None:
    cheap, dear = (measured(row_share, first=0.5, side=0.4) for row_share in (0.002, 0.1))
    assert cheap.tokens_to_draft(0, 1.0, 60, 0) > dear.tokens_to_draft(0, 1.0, 60, 0) > 0
    chain = measured(0.002, first=0.5, side=0.4, width=1)
    assert cheap.tokens_to_draft(0, 1.0, 60, 0) > chain.tokens_to_draft(0, 1.0, 60, 0)


def test_the_best_tree_has_its_likeliest_nodes_first() -> None:
    assert list(islice(best_survivals([0.5, 0.3, 0.1]), 9)) == pytest.approx(
        [0.5, 0.3, 0.25, 0.15, 0.15, 0.125, 0.1, 0.09, 0.075]
    )

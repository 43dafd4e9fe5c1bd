"""How many draft tokens a session requests: worked examples of what they cost and gain."""

from __future__ import annotations

import pytest

from galley.core.session.draft_statistics import DraftStatistics, SharedStatistics
from galley.core.session.speculation import Speculation
from tests.fakes.session_world import spec

MS = 1_000_000
PLENTY = 100


def shared(alpha: float = 0.5, **workload: float) -> tuple[SharedStatistics, DraftStatistics]:
    """Return statistics in which the workload of `spec()` has these means."""
    here = SharedStatistics()
    statistics = here.for_workload(spec().strategy, spec().workload)
    for name, value in {"alpha": alpha, **workload}.items():
        setattr(statistics, name, value)
    return here, statistics


def fixed(k: int, here: SharedStatistics) -> Speculation:
    return Speculation(spec(k=k, auto=False), here)


def auto(k: int, here: SharedStatistics) -> Speculation:
    return Speculation(spec(k=k, auto=True), here)


def first(speculation: Speculation, room: int = PLENTY, unread: int = 0) -> int:
    """Return how many tokens are requested while none is ready."""
    return speculation.tokens_to_draft(0, 1.0, room, unread)


@pytest.mark.parametrize(("weight", "alpha"), [(0.0, 0.5), (0.5, 0.7), (1.0, 0.9)])
def test_alpha_lies_between_workload_and_session(weight: float, alpha: float) -> None:
    here, statistics = shared(0.9)
    speculation = auto(8, here)
    statistics.alpha, statistics.deviation_squared = 0.5, 0.02
    statistics.deviation_explained = 0.02 * weight
    assert speculation.alpha == pytest.approx(alpha)


@pytest.mark.parametrize(("recovery", "can"), [(0.49, False), (0.5, True)])
def test_drafts_recover_where_they_did_in_half_of_all_cases(recovery: float, can: bool) -> None:
    here, _ = shared(recovery=recovery)
    assert auto(8, here).can_recover is can


def test_a_fixed_k_is_requested_as_it_is() -> None:
    here, _ = shared()
    assert first(fixed(6, here)) == 6
    assert first(fixed(6, here), room=2) == 2
    assert first(fixed(0, here)) == 0
    assert fixed(6, here).tokens_to_draft(4, 0.5, 1, 0) == 1
    here.share_ns = 1.0
    assert fixed(6, here).tokens_to_draft(4, 0.5, PLENTY, 0) == 2, "nothing is worth it, but k is asked for"


@pytest.mark.parametrize("room", [0, -1])
def test_nothing_is_requested_without_room(room: int) -> None:
    here, _ = shared()
    assert first(auto(8, here), room=room) == 0


def test_a_request_for_less_than_half_of_a_proposal_waits() -> None:
    here, _ = shared()
    assert fixed(4, here).tokens_to_draft(4, 0.5, 2, 0) == 2
    assert fixed(4, here).tokens_to_draft(4, 0.5, 1, 0) == 0


def test_as_many_are_ready_as_two_steps_can_take() -> None:
    here, _ = shared()
    assert fixed(4, here).tokens_to_draft(7, 0.5, PLENTY, 0) == 2, "2 * 4, and the bonus token between"
    assert fixed(4, here).tokens_to_draft(9, 0.5, PLENTY, 0) == 0


@pytest.mark.parametrize(
    ("alpha", "token_ns", "count"),
    [
        # (1 + alpha + ... + alpha^count) / (1000 + count * token_ns) is highest there.
        (0.5, 100, 2),
        (0.8, 100, 6),
        (0.8, 200, 4),
        (0.2, 300, 0),
        # 0.95 would still pay, but a step is over by then.
        (0.95, 600, 2),
    ],
)
def test_a_proposal_confirms_the_most_tokens_per_time(alpha: float, token_ns: float, count: int) -> None:
    here, _ = shared(alpha, token_ns=token_ns)
    here.step_ns = 1000
    assert first(auto(16, here)) == count


def test_a_slow_link_takes_what_is_confirmed_meanwhile() -> None:
    here, _ = shared(0.5)
    here.step_ns, here.message_ns = 1000, 1000
    # Two steps of 1 + 1/2 + ... + 1/16 tokens.
    assert first(fixed(4, here)) == 4 + 4


@pytest.mark.parametrize(
    ("share_ns", "row_ns", "others_ns", "count"),
    [
        # Tokens gain 0.5, 0.25, 0.125 ... of the share, less a row; together more than a request's 0.4 ms.
        (MS, 0, 0, 8),
        (MS, 100_000, 60_000, 3),
        # The fourth is for the step after: 1/8 * (0.5 - 0.1) ms, of which others lose 0.04 ms.
        (MS, 100_000, 40_000, 4),
        (400_000, 0, 0, 0),
        (402_000, 0, 0, 8),
    ],
)
def test_tokens_ahead_are_worth_their_cost(share_ns: int, row_ns: int, others_ns: int, count: int) -> None:
    here, _ = shared(0.5, others_ns=others_ns)
    here.share_ns, here.row_ns = share_ns, row_ns
    assert fixed(8, here).tokens_to_draft(8, 1.0, PLENTY, 0) == count


@pytest.mark.parametrize("rate", ["nonempty_rate", "verified_rate"])
def test_what_is_often_empty_or_not_verified_is_worth_less(rate: str) -> None:
    for value, count in ((0.7, 3), (0.69, 0)):  # of 0.575 ms
        here, _ = shared(0.5, others_ns=60_000, **{rate: value})
        here.share_ns, here.row_ns = MS, 100_000
        assert fixed(8, here).tokens_to_draft(8, 1.0, PLENTY, 0) == count


def test_a_prompt_that_the_draft_has_to_read_costs() -> None:
    for unread, count in ((1_000, 4), (10_000, 0)):  # over 32 steps
        here, _ = shared(0.9, read_ns=10_000)
        here.share_ns = MS
        assert first(auto(8, here), unread=unread) == count


@pytest.mark.parametrize(
    ("rights", "verdicts", "count"),
    [
        ("", 23, 0),
        ("", 24, 4),
        ("rrr", 1, 0),
        ("rrrr", 1, 4),
        ("rrrr", 0, 0),
        ("rrrrwrrr", 1, 0),
    ],
)
def test_worthless_drafts_are_tried_now_and_then(rights: str, verdicts: int, count: int) -> None:
    here, _ = shared()
    here.share_ns = 1000
    speculation = auto(8, here)
    for right in rights:
        speculation.record_token(right == "r")
    for _ in range(verdicts):
        speculation.record_verdict(offered=False, verified=0)
    assert first(speculation) == count
    assert first(speculation) == 0, "and not again at once"


def test_a_cheap_trial_comes_after_four_verdicts() -> None:
    here, _ = shared(0.01)
    here.share_ns = 10 * MS
    speculation = auto(8, here)
    for count in (0, 0, 0, 0, 4):
        assert first(speculation) == count
        speculation.record_verdict(offered=False, verified=0)

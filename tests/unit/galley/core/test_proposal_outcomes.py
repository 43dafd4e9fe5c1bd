"""Proposals compared with what came of them."""

from __future__ import annotations

from galley.core.lookup.calibration import ProposalOutcomes


class Seen(list[tuple[int, bool]]):
    def __call__(self, i: int, accepted: bool) -> None:
        self.append((i, accepted))


def test_each_token_is_recorded_up_to_the_first_wrong_one() -> None:
    seen, hindsight = Seen(), ProposalOutcomes()
    hindsight.add(2, [], [5, 6, 7, 8], seen)
    hindsight.confirm([1, 2])
    assert seen == []
    hindsight.confirm([1, 2, 5])
    assert seen == [(0, True)]
    hindsight.confirm([1, 2, 5, 6, 9])
    hindsight.confirm([1, 2, 5, 6, 9, 8])
    assert seen == [(0, True), (1, True), (2, False)]


def test_nothing_is_recorded_after_wrong_tokens_ahead() -> None:
    right, wrong, hindsight = Seen(), Seen(), ProposalOutcomes()
    hindsight.add(1, [2, 3], [4, 5], right)
    hindsight.add(1, [2, 9], [3, 4], wrong)
    hindsight.confirm([1, 2, 3, 4, 9])
    hindsight.confirm([1, 2, 3, 4, 9, 9])
    assert right == [(0, True), (1, False)]
    assert wrong == []


def test_a_proposal_may_grow_until_it_is_compared() -> None:
    seen, hindsight, proposed = Seen(), ProposalOutcomes(), [2]
    hindsight.add(1, [], proposed, seen)
    proposed.append(3)
    hindsight.confirm([1, 2, 3, 4])
    assert seen == [(0, True), (1, True)]


def test_waiting_proposals_are_bounded() -> None:
    seens, hindsight = [Seen() for _ in range(100)], ProposalOutcomes()
    for seen in seens:
        hindsight.add(1, [], [2], seen)
    hindsight.confirm([1, 2])
    recorded = [bool(seen) for seen in seens]
    assert recorded == [False] * 84 + [True] * 16

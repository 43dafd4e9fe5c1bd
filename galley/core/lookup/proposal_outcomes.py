"""Compare a session's proposals with the tokens that were confirmed later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Proposals kept: more than are made ahead of one verdict.
_MOST = 16


@dataclass(slots=True)
class _Proposal:
    """The tokens `ahead` start at `start`, then the `proposed` ones; the first `right` of all were right."""

    start: int
    ahead: Sequence[int]
    proposed: Sequence[int]
    record: Callable[[int, bool], None]
    right: int = 0

    def compare(self, confirmed: Sequence[int]) -> bool:
        """Record what is known now. Return True if more may follow."""
        while (position := self.start + self.right) < len(confirmed):
            of_proposed = self.right - len(self.ahead)
            if of_proposed >= len(self.proposed):
                return False
            token = self.ahead[self.right] if of_proposed < 0 else self.proposed[of_proposed]
            accepted = token == confirmed[position]
            if of_proposed >= 0:
                self.record(of_proposed, accepted)
            if not accepted:
                return False
            self.right += 1
        return True


class ProposalOutcomes:
    def __init__(self) -> None:
        self._waiting: list[_Proposal] = []

    def add(
        self, start: int, ahead: Sequence[int], proposed: Sequence[int], record: Callable[[int, bool], None]
    ) -> None:
        """Add the `proposed` tokens, which may still grow, after `start` confirmed tokens and those `ahead`.

        As tokens are confirmed, calls `record(i, accepted)` for each proposed one up to the first that is
        wrong; for none if one of those ahead was wrong.
        """
        self._waiting = [*self._waiting[1 - _MOST :], _Proposal(start, ahead, proposed, record)]

    def confirm(self, confirmed: Sequence[int]) -> None:
        self._waiting = [proposal for proposal in self._waiting if proposal.compare(confirmed)]

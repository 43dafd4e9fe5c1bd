"""What became of a session's proposals: each is compared with the tokens that were confirmed after all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Proposals that wait for their verdict: more than are made ahead of one.
_MOST = 16


@dataclass(slots=True)
class _Proposal:
    """`ahead`, the first of which stands at `start`, then `proposed`; the first `right` of all came true."""

    start: int
    ahead: Sequence[int]
    proposed: Sequence[int]
    record: Callable[[int, bool], None]
    right: int = 0

    def compare(self, confirmed: Sequence[int]) -> bool:
        """Tell what is known now; may there be more later?"""
        while (position := self.start + self.right) < len(confirmed):
            of_proposed = self.right - len(self.ahead)
            if of_proposed >= len(self.proposed):
                return False
            guess = self.ahead[self.right] if of_proposed < 0 else self.proposed[of_proposed]
            accepted = guess == confirmed[position]
            if of_proposed >= 0:
                self.record(of_proposed, accepted)
            if not accepted:
                return False
            self.right += 1
        return True


class ProposalOutcomes:
    """The proposals of one session that wait to be compared; whether they were ever verified is all one."""

    def __init__(self) -> None:
        self._waiting: list[_Proposal] = []

    def add(
        self, start: int, ahead: Sequence[int], proposed: Sequence[int], record: Callable[[int, bool], None]
    ) -> None:
        """After `start` confirmed tokens and those `ahead` come the `proposed`, which may still grow.

        As they are confirmed, `saw(i, accepted)` is told of each up to the first that is wrong; of none if
        those ahead were wrong.
        """
        self._waiting = [*self._waiting[1 - _MOST :], _Proposal(start, ahead, proposed, record)]

    def confirm(self, confirmed: Sequence[int]) -> None:
        """These are the session's confirmed tokens now."""
        self._waiting = [proposal for proposal in self._waiting if proposal.compare(confirmed)]

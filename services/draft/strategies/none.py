"""No guesses: plain decoding, through the same calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.draft.strategies.base import DraftJob, Proposal


class NoneStrategy:
    """Always proposes nothing."""

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """See `Strategy.propose`."""
        return [[] for _ in jobs]

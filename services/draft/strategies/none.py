"""No guesses: plain decoding, through the same calls."""

from __future__ import annotations

from collections.abc import Sequence

from services.draft.strategies.base import DraftJob, Guess


class NoneStrategy:
    """Always proposes nothing."""

    def begin(self, jobs: Sequence[DraftJob]) -> list[Guess]:
        """See `Strategy.begin`."""
        return [Guess(job, done=True) for job in jobs]

    def advance(self, guesses: Sequence[Guess]) -> None:
        """See `Strategy.advance`; no guess stays open."""

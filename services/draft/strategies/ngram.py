"""Prompt lookup over each session's own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.core import ngram

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.draft.strategies.base import DraftJob, Proposal


class NgramStrategy:
    """Matches suffixes of `max_n` down to `min_n` tokens; see `services.core.ngram`."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n = min_n
        self._max_n = max_n

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """See `Strategy.propose`."""
        return [
            ngram.propose(job.session.tokens, job.k, min_n=self._min_n, max_n=self._max_n) for job in jobs
        ]

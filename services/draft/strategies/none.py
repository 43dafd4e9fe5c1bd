"""Propose nothing: plain decoding through the same calls."""

from __future__ import annotations

from collections.abc import Sequence

from services.draft.strategies.base import DraftJob, Proposal


class NoneStrategy:
    """Propose nothing, so that the target decodes plainly."""

    def begin(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        """Return empty, finished proposals."""
        return [Proposal(job, done=True) for job in jobs]

    def advance(self, proposals: Sequence[Proposal]) -> None:
        """Do nothing: no proposal is unfinished."""

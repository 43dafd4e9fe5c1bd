"""Count the steps and requests of a draft replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from galley.common.metrics import catalogue
from galley.common.metrics.labels import PROPOSED
from galley.common.metrics.registry import Registry
from services.draft.drafter import DraftCounts

_SECOND = 1e9


class DraftMeter:
    """Receive each step and request; this base class counts nothing."""

    def expect(self, strategies: Iterable[str]) -> None:
        """Show each outcome of these strategies from the start."""

    def began(self, waits_ns: Iterable[int]) -> None:
        """Count requests that started, with their queue times."""

    def stepped(self, sessions: int, took_ns: int) -> None:
        """Count a step. Called on the worker thread."""

    def ended(self, strategy: str, outcome: str) -> None:
        """Count a request that ended with one of the outcomes of the catalogue."""


class CountingDraftMeter(DraftMeter):
    """Count in a registry, which reads `queue_depth` and `counts` when scraped."""

    def __init__(self, registry: Registry, queue_depth: Callable[[], int], counts: DraftCounts) -> None:
        self._age = registry.distribute(catalogue.DRAFT_QUEUE_AGE).at()
        self._sessions = registry.distribute(catalogue.DRAFT_BATCH_SESSIONS).at()
        self._duration = registry.distribute(catalogue.DRAFT_STEP_DURATION).at()
        self._proposals = registry.count(catalogue.DRAFT_PROPOSALS)
        registry.observe(catalogue.DRAFT_QUEUE_DEPTH, lambda: [((), queue_depth())])
        registry.observe(catalogue.WASTED_DRAFT_TOKENS, lambda: [(("cancelled",), counts.wasted)])

    def expect(self, strategies: Iterable[str]) -> None:
        """Create a series for each outcome."""
        for strategy in strategies:
            for outcome in PROPOSED.values:
                self._proposals.at(strategy, outcome)

    def began(self, waits_ns: Iterable[int]) -> None:
        """Observe the queue times."""
        for wait_ns in waits_ns:
            self._age.observe(wait_ns / _SECOND)

    def stepped(self, sessions: int, took_ns: int) -> None:
        """Observe sessions and duration."""
        if sessions:
            self._sessions.observe(sessions)
            self._duration.observe(took_ns / _SECOND)

    def ended(self, strategy: str, outcome: str) -> None:
        """Count the outcome."""
        self._proposals.at(strategy, outcome).value += 1

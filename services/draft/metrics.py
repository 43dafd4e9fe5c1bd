"""Count the steps and requests of a draft replica."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from galley.common.metrics import catalogue
from galley.common.metrics.labels import PROPOSED
from galley.common.metrics.registry import Registry
from services.draft.drafter import Drafter

_SECOND = 1e9


class DraftMeter:
    """Count in a registry, which reads `queue_depth` and the drafter's counts when it is scraped."""

    def __init__(self, registry: Registry, queue_depth: Callable[[], int], drafter: Drafter) -> None:
        """Show each outcome of the drafter's strategies from the start."""
        self._age = registry.distribute(catalogue.DRAFT_QUEUE_AGE).at()
        self._sessions = registry.distribute(catalogue.DRAFT_BATCH_SESSIONS).at()
        self._duration = registry.distribute(catalogue.DRAFT_STEP_DURATION).at()
        self._proposals = registry.count(catalogue.DRAFT_PROPOSALS)
        registry.observe(catalogue.DRAFT_QUEUE_DEPTH, lambda: [((), queue_depth())])
        registry.observe(catalogue.WASTED_DRAFT_TOKENS, lambda: [(("cancelled",), drafter.counts.wasted)])
        for strategy in drafter.strategies:
            for outcome in PROPOSED.values:
                self._proposals.at(strategy, outcome)

    def began(self, waits_ns: Iterable[int]) -> None:
        """Count requests that started, with their queue times."""
        for wait_ns in waits_ns:
            self._age.observe(wait_ns / _SECOND)

    def stepped(self, sessions: int, took_ns: int) -> None:
        """Count a step, if it had sessions. Called on the worker thread."""
        if sessions:
            self._sessions.observe(sessions)
            self._duration.observe(took_ns / _SECOND)

    def ended(self, strategy: str, outcome: str) -> None:
        """Count a request that ended with one of the outcomes of the catalogue."""
        self._proposals.at(strategy, outcome).value += 1

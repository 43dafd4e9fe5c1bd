"""What a draft replica counts of its steps and of what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from galley.common.metrics import catalogue
from galley.common.metrics.labels import PROPOSED
from galley.common.metrics.registry import Registry
from services.draft.drafter import DraftCounts

_SECOND = 1e9


class DraftMeter:
    """Hears of each step and item; this one counts nothing."""

    def expect(self, strategies: Iterable[str]) -> None:
        """These are offered."""

    def began(self, waits_ns: Iterable[int]) -> None:
        """Items were taken up that had waited so long."""

    def stepped(self, sessions: int, took_ns: int) -> None:
        """A step is over. Called on the worker's thread."""

    def ended(self, strategy: str, outcome: str) -> None:
        """An item has come to one of the outcomes that the catalogue names."""


class CountingDraftMeter(DraftMeter):
    """Counts them in a registry; `queue_depth` and `counts` are read from there."""

    def __init__(self, registry: Registry, queue_depth: Callable[[], int], counts: DraftCounts) -> None:
        self._age = registry.distribute(catalogue.DRAFT_QUEUE_AGE).at()
        self._sessions = registry.distribute(catalogue.DRAFT_BATCH_SESSIONS).at()
        self._duration = registry.distribute(catalogue.DRAFT_STEP_DURATION).at()
        self._proposals = registry.count(catalogue.DRAFT_PROPOSALS)
        registry.observe(catalogue.DRAFT_QUEUE_DEPTH, lambda: [((), queue_depth())])
        registry.observe(catalogue.WASTED_DRAFT_TOKENS, lambda: [(("cancelled",), counts.wasted)])

    def expect(self, strategies: Iterable[str]) -> None:
        """Each outcome of them is shown from the start."""
        for strategy in strategies:
            for outcome in PROPOSED.values:
                self._proposals.at(strategy, outcome)

    def began(self, waits_ns: Iterable[int]) -> None:
        """See `DraftMeter`."""
        for wait_ns in waits_ns:
            self._age.observe(wait_ns / _SECOND)

    def stepped(self, sessions: int, took_ns: int) -> None:
        """See `DraftMeter`."""
        if sessions:
            self._sessions.observe(sessions)
            self._duration.observe(took_ns / _SECOND)

    def ended(self, strategy: str, outcome: str) -> None:
        """See `DraftMeter`."""
        self._proposals.at(strategy, outcome).value += 1

"""The metrics of a draft, and the spans of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal, TypeAlias

from galley.common.metrics import catalogue
from galley.common.metrics.labels import PROPOSED
from galley.common.metrics.registry import Registry
from galley.common.tracing.item_spans import LINK_ITEM
from galley.common.tracing.light_spans import LightSpan, SpanScope
from galley.core import names

LoadResult: TypeAlias = Literal["loaded", "refused", "failed"]

_SECOND = 1e9


class BatchSpans:
    """The span of the current steps, until requests arrive or none are left.

    It is in the trace of the first traced request in them, and links to all.
    """

    def __init__(self, spans: SpanScope | None) -> None:
        self._spans = spans
        # The spans of the requests that took part, in order of arrival.
        self._items: dict[LightSpan, None] = {}
        self._began_ns = self._ended_ns = 0
        self._steps = 0
        self._sessions = 0

    def stepped(self, items: Sequence[LightSpan], took_ns: int, sessions: int, steps: int) -> None:
        """Add `steps` of `sessions` sessions that ended now; `items` are the traced requests."""
        self._ended_ns = time.time_ns()
        if not self._items:
            self._began_ns = self._ended_ns - took_ns
        self._items.update(dict.fromkeys(items))
        self._steps += steps
        self._sessions = max(self._sessions, sessions)

    def end(self) -> None:
        if self._spans is None or not self._items:
            return
        # Nothing refers to it, so it is created at its end.
        span = self._spans.step_of(next(iter(self._items)), names.DRAFT_BATCH, self._began_ns)
        span.attributes |= {names.BATCH_SESSIONS: self._sessions, names.BATCH_STEPS: self._steps}
        span.link_to(self._items, LINK_ITEM)
        span.end(self._ended_ns)
        self._items = {}
        self._steps = self._sessions = 0


class DraftMeter:
    """Count in a registry, which reads `queue_depth` and the `wasted` tokens when it is scraped."""

    def __init__(
        self,
        registry: Registry,
        strategies: Collection[str],
        queue_depth: Callable[[], int],
        wasted: Callable[[], int],
    ) -> None:
        """Register each outcome of `strategies`, so that it is shown as 0 from the start."""
        self._age = registry.distribute(catalogue.DRAFT_QUEUE_AGE).at()
        self._sessions = registry.distribute(catalogue.DRAFT_BATCH_SESSIONS).at()
        self._duration = registry.distribute(catalogue.DRAFT_STEP_DURATION).at()
        self._proposals = registry.count(catalogue.DRAFT_PROPOSALS)
        self._loads = registry.count(catalogue.DRAFT_LOADS)
        registry.observe(catalogue.DRAFT_QUEUE_DEPTH, lambda: [((), queue_depth())])
        registry.observe(catalogue.WASTED_DRAFT_TOKENS, lambda: [(("cancelled",), wasted())])
        for strategy in strategies:
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

    def loaded(self, result: LoadResult) -> None:
        """Count a call of LoadDraft."""
        self._loads.at(result).value += 1

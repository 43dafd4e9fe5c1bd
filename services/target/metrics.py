"""What a target replica counts of its passes, its queue and its KV pool."""

from __future__ import annotations

from collections.abc import Sequence

from galley.common.metrics import catalogue
from galley.common.metrics.registry import Registry
from galley.core.kv.table import KvTable
from galley.core.scheduler.scheduler import Scheduler
from galley.core.step import StepPlan

_SECOND = 1e9


class PassMeter:
    """Hears of each pass; this one counts nothing."""

    def passed(self, plan: StepPlan, confirmed: int, took_ns: int, waits_ns: Sequence[int]) -> None:
        """A pass confirmed so many tokens; `waits_ns` is how long items waited that it was the first of."""


class CountingPassMeter(PassMeter):
    """Counts them in a registry; what the scheduler and its table count themselves is read from there."""

    def __init__(self, registry: Registry, scheduler: Scheduler, table: KvTable) -> None:
        self._sessions = registry.distribute(catalogue.BATCH_SESSIONS).at()
        self._rows = registry.distribute(catalogue.BATCH_ROWS).at()
        self._tokens = registry.distribute(catalogue.BATCH_TOKENS).at()
        self._duration = registry.distribute(catalogue.BATCH_DURATION).at()
        self._age = registry.distribute(catalogue.QUEUE_AGE).at()
        self._prefill_rows = registry.count(catalogue.BATCH_PREFILL_ROWS).at()
        self._draft_rows = registry.count(catalogue.BATCH_DRAFT_ROWS).at()
        counts = scheduler.counts
        registry.observe(catalogue.LINGER, lambda: [((), counts.linger_ns / _SECOND)])
        registry.observe(catalogue.QUEUE_DEPTH, lambda: [((), scheduler.queue_depth)])
        registry.observe(catalogue.KV_BLOCKS, lambda: _blocks(table))
        registry.observe(catalogue.KV_PROMPT_TOKENS, lambda: [((), counts.prompt_tokens)])
        registry.observe(catalogue.KV_REUSED_TOKENS, lambda: [((), counts.reused_tokens)])
        registry.observe(catalogue.KV_MISSES, lambda: [((), counts.missed)])
        registry.observe(catalogue.PREEMPTIONS, lambda: [((), counts.preempted)])
        registry.observe(catalogue.EVICTIONS, lambda: [((), table.evicted_blocks)])
        registry.observe(catalogue.OUT_OF_BLOCKS, lambda: [((), counts.out_of_blocks)])

    def passed(self, plan: StepPlan, confirmed: int, took_ns: int, waits_ns: Sequence[int]) -> None:
        """See `PassMeter`."""
        rows, wanted = plan.rows, sum(chunk.want_logits for chunk in plan.chunks)
        drawing = sum(chunk.want_logits > 0 for chunk in plan.chunks)
        self._sessions.observe(len(plan.chunks))
        self._rows.observe(rows)
        self._tokens.observe(confirmed)
        self._duration.observe(took_ns / _SECOND)
        # Of each chunk that draws, one row is the last confirmed token, and the others are drafts.
        self._draft_rows.value += wanted - drawing
        self._prefill_rows.value += rows - wanted
        for wait_ns in waits_ns:
            self._age.observe(wait_ns / _SECOND)


def _blocks(table: KvTable) -> list[tuple[tuple[str], float]]:
    used, free = table.live_blocks, table.empty
    return [(("used",), used), (("cached",), table.total - used - free), (("free",), free)]

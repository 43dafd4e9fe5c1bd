"""Metrics of a target replica's steps, its queue and its KV pool."""

from __future__ import annotations

from collections.abc import Sequence

from galley.common.metrics import catalogue
from galley.common.metrics.registry import Registry
from galley.core.kv.table import KvTable
from galley.core.scheduler.scheduler import Scheduler
from galley.core.step import StepPlan

_SECOND = 1e9


class StepMeter:
    """Count steps in a registry, which reads the scheduler's and the table's own counts when scraped."""

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

    def count(self, plan: StepPlan, confirmed: int, duration_ns: int, queue_times_ns: Sequence[int]) -> None:
        """Count a step that confirmed `confirmed` tokens in `duration_ns`.

        `queue_times_ns` are those of the requests that started in it.
        """
        rows, logit_rows = plan.rows, sum(chunk.want_logits for chunk in plan.chunks)
        sampled_chunks = sum(chunk.want_logits > 0 for chunk in plan.chunks)
        self._sessions.observe(len(plan.chunks))
        self._rows.observe(rows)
        self._tokens.observe(confirmed)
        self._duration.observe(duration_ns / _SECOND)
        # One logit row of each sampled chunk is the last confirmed token; the others are draft tokens.
        self._draft_rows.value += logit_rows - sampled_chunks
        self._prefill_rows.value += rows - logit_rows
        for queue_time_ns in queue_times_ns:
            self._age.observe(queue_time_ns / _SECOND)


def _blocks(table: KvTable) -> list[tuple[tuple[str], float]]:
    used, free = table.live_blocks, table.empty
    return [(("used",), used), (("cached",), table.total - used - free), (("free",), free)]

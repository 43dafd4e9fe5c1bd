"""Dashboard of steps, queues and KV caches of targets."""

from __future__ import annotations

from galley.common.metrics import catalogue as of
from scripts.monitoring.grafana import Dashboard, Panel, Query, Row
from scripts.monitoring.overview import quantiles
from scripts.monitoring.queries import WINDOW, gauge, heatmap, mean, rate, ratio

_ALL_ROWS = f'sum(rate({of.BATCH_ROWS.prometheus}_sum{{namespace=~"$namespace"}}[{WINDOW}]))'

TARGET_ENGINE = Dashboard(
    "target-engine",
    "Galley: target engine",
    "Steps, queues and KV caches of targets.",
    (
        Row(
            "Steps",
            (
                Panel("Step duration", "Forward pass and sampling.", quantiles(of.BATCH_DURATION), "s"),
                Panel(
                    "Steps by duration",
                    "Number of steps in each bucket of duration.",
                    (Query(heatmap(of.BATCH_DURATION), "{{le}}"),),
                    kind="heatmap",
                ),
                Panel(
                    "Sessions per step",
                    "Mean number of sessions in a step, by target.",
                    (Query(mean(of.BATCH_SESSIONS, "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Rows and tokens per step",
                    "Mean number of computed rows and of confirmed tokens in a step.",
                    (Query(mean(of.BATCH_ROWS), "rows"), Query(mean(of.BATCH_TOKENS), "tokens")),
                ),
                Panel(
                    "Rows by kind",
                    "Rows per second: prompt tokens, draft tokens, and one per session that decodes.",
                    (
                        Query(rate(of.BATCH_PREFILL_ROWS), "prompts"),
                        Query(rate(of.BATCH_DRAFT_ROWS), "drafts"),
                        Query(
                            f"{_ALL_ROWS} - {rate(of.BATCH_PREFILL_ROWS)} - {rate(of.BATCH_DRAFT_ROWS)}",
                            "decoding",
                        ),
                    ),
                    stacked=True,
                ),
                Panel(
                    "Linger time",
                    "Share of time for which steps waited for draft tokens that were due.",
                    (Query(rate(of.LINGER, "instance"), "{{instance}}"),),
                    "percentunit",
                    max_value=1,
                ),
            ),
        ),
        Row(
            "Queue",
            (
                Panel(
                    "Queue age",
                    "Time from the arrival of a request to its first step.",
                    quantiles(of.QUEUE_AGE),
                    "s",
                    width=12,
                    runbook="GalleyQueueAgeHigh",
                ),
                Panel(
                    "Queue depth",
                    "Open requests, by target.",
                    (Query(gauge(of.QUEUE_DEPTH, "instance"), "{{instance}}"),),
                    width=12,
                    runbook="GalleyQueueAgeHigh",
                ),
            ),
        ),
        Row(
            "KV cache",
            (
                Panel(
                    "KV blocks",
                    "Blocks used by open sessions, cached, or free.",
                    (Query(gauge(of.KV_BLOCKS, "state"), "{{state}}"),),
                    stacked=True,
                    runbook="GalleyTargetOutOfBlocks",
                ),
                Panel(
                    "Prefix cache hits",
                    "Share of the tokens of new or moved sessions whose KV was in the prefix cache.",
                    (Query(ratio(rate(of.KV_REUSED_TOKENS), rate(of.KV_PROMPT_TOKENS)), "hits"),),
                    "percentunit",
                    max_value=1,
                ),
                Panel(
                    "Evictions",
                    "Cached blocks per second that were evicted.",
                    (Query(rate(of.EVICTIONS, "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Preemptions",
                    "Sessions per second whose request was stopped because KV blocks or slots ran out.",
                    (Query(rate(of.PREEMPTIONS, "instance"), "{{instance}}"),),
                    runbook="GalleyTargetOutOfBlocks",
                ),
                Panel(
                    "Out of blocks",
                    "Requests per second rejected or preempted because no KV block was free.",
                    (Query(rate(of.OUT_OF_BLOCKS, "instance"), "{{instance}}"),),
                    runbook="GalleyTargetOutOfBlocks",
                ),
                Panel(
                    "Cache misses",
                    "Requests per second whose prefix was not cached.",
                    (Query(rate(of.KV_MISSES, "instance"), "{{instance}}"),),
                ),
            ),
        ),
    ),
)

"""Dashboard of steps, queues and KV caches of targets."""

from __future__ import annotations

from galley.common.metrics import catalogue as of
from scripts.monitoring.grafana import Dashboard, Panel, Query, Row
from scripts.monitoring.overview import quantiles
from scripts.monitoring.queries import CHOSEN, WINDOW, gauge, heatmap, mean, quantile, rate, ratio

_ALL_ROWS = f"sum(rate({of.BATCH_ROWS.prometheus}_sum{{{CHOSEN}}}[{WINDOW}]))"

TARGET_ENGINE = Dashboard(
    "target-engine",
    "Galley: target engine",
    "Steps, queues and KV caches of targets.",
    (
        Row(
            "Steps",
            (
                Panel(
                    "Step duration",
                    "Forward pass and sampling.",
                    quantiles(of.BATCH_DURATION),
                    "s",
                    limits=(0.25, 1),
                ),
                Panel(
                    "Steps by duration",
                    "Number of steps in each bucket of duration.",
                    (Query(heatmap(of.BATCH_DURATION), "{{le}}"),),
                    kind="heatmap",
                    unit="s",
                ),
                Panel(
                    "Sessions per step",
                    "Mean number of sessions in a step, by target.",
                    (Query(mean(of.BATCH_SESSIONS, "instance"), "{{instance}}"),),
                    unit="suffix: sessions",
                ),
                Panel(
                    "Rows and tokens per step",
                    "Mean number of computed rows and of confirmed tokens in a step.",
                    (Query(mean(of.BATCH_ROWS), "rows"), Query(mean(of.BATCH_TOKENS), "tokens")),
                    unit="none",
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
                    unit="suffix: rows/s",
                ),
                Panel(
                    "Time waiting for draft tokens",
                    "Share of time for which steps waited for draft tokens that were due.",
                    (Query(rate(of.LINGER, "instance"), "{{instance}}"),),
                    "percentunit",
                    max_value=1,
                    limits=(0.05, 0.2),
                ),
                Panel(
                    "Grammars",
                    "Mean time that a step waited for masks, and time to compile a request's grammar.",
                    (
                        Query(ratio(rate(of.MASK_WAIT), rate(of.BATCH_DURATION)), "mask wait"),
                        Query(
                            quantile(0.95, of.GRAMMAR_COMPILE_DURATION, "result"), "compile p95, {{result}}"
                        ),
                    ),
                    "s",
                    limits=(0.01, 0.1),
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
                    runbooks=("GalleyQueueAgeHigh",),
                    limits=(0.5, 1),
                ),
                Panel(
                    "Queue depth",
                    "Open requests, by target.",
                    (Query(gauge(of.QUEUE_DEPTH, "instance"), "{{instance}}"),),
                    width=12,
                    runbooks=("GalleyQueueAgeHigh",),
                    unit="suffix: requests",
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
                    runbooks=("GalleyTargetOutOfBlocks",),
                    unit="suffix: blocks",
                ),
                Panel(
                    "Prefix cache hits",
                    "Share of the tokens of new or moved sessions whose KV was in the prefix cache.",
                    (Query(ratio(rate(of.KV_REUSED_TOKENS), rate(of.KV_PROMPT_TOKENS)), "hits"),),
                    "percentunit",
                    max_value=1,
                ),
                Panel(
                    "Evicted blocks",
                    "Cached blocks per second that were evicted.",
                    (Query(rate(of.EVICTIONS, "instance"), "{{instance}}"),),
                    unit="suffix: blocks/s",
                ),
                Panel(
                    "Preemptions",
                    "Sessions per second whose request was stopped because KV blocks or slots ran out.",
                    (Query(rate(of.PREEMPTIONS, "instance"), "{{instance}}"),),
                    runbooks=("GalleyTargetOutOfBlocks",),
                    unit="suffix: sessions/s",
                    limits=(0.05, 0.1),
                ),
                Panel(
                    "Requests without a free block",
                    "Requests per second rejected or preempted because no KV block was free.",
                    (Query(rate(of.OUT_OF_BLOCKS, "instance"), "{{instance}}"),),
                    runbooks=("GalleyTargetOutOfBlocks",),
                    unit="reqps",
                    limits=(0.05, 0.1),
                ),
                Panel(
                    "Cache misses",
                    "Requests per second whose prefix was not cached.",
                    (Query(rate(of.KV_MISSES, "instance"), "{{instance}}"),),
                    unit="reqps",
                ),
            ),
        ),
    ),
)

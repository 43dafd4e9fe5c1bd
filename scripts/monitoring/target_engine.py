"""What targets compute, for whom, and with how much room."""

from __future__ import annotations

from galley.common.metrics import catalogue as of
from scripts.monitoring.grafana import Dashboard, Panel, Query, Row
from scripts.monitoring.overview import quantiles
from scripts.monitoring.queries import WINDOW, gauge, heatmap, mean, rate, ratio

_ALL_ROWS = f'sum(rate({of.BATCH_ROWS.prometheus}_sum{{namespace=~"$namespace"}}[{WINDOW}]))'

TARGET_ENGINE = Dashboard(
    "target-engine",
    "Galley: target engine",
    "What targets compute, for whom, and with how much room.",
    (
        Row(
            "Passes",
            (
                Panel(
                    "Pass duration", "Of one pass over all its sessions.", quantiles(of.BATCH_DURATION), "s"
                ),
                Panel(
                    "Passes by duration",
                    "How many took how long.",
                    (Query(heatmap(of.BATCH_DURATION), "{{le}}"),),
                    kind="heatmap",
                ),
                Panel(
                    "Sessions a pass",
                    "In the mean, by target.",
                    (Query(mean(of.BATCH_SESSIONS, "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Rows and tokens a pass",
                    "Rows that a pass feeds, and tokens that it confirms, in the mean.",
                    (Query(mean(of.BATCH_ROWS), "rows"), Query(mean(of.BATCH_TOKENS), "tokens")),
                ),
                Panel(
                    "Rows by kind",
                    "A second: of prompts, of draft tokens, and of sessions that decode.",
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
                    "Lingering",
                    "Share of the time that passes were put off, for a draft that was due.",
                    (Query(rate(of.LINGER, "instance"), "{{instance}}"),),
                    "percentunit",
                    most=1,
                ),
            ),
        ),
        Row(
            "Queue",
            (
                Panel(
                    "Queue age",
                    "How long items waited for the pass that fed their first row.",
                    quantiles(of.QUEUE_AGE),
                    "s",
                    width=12,
                    runbook="GalleyQueueAgeHigh",
                ),
                Panel(
                    "Queue depth",
                    "Items that stand at each target.",
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
                    "Used by live sessions, cached for whoever brings the same tokens, or free.",
                    (Query(gauge(of.KV_BLOCKS, "state"), "{{state}}"),),
                    stacked=True,
                    runbook="GalleyTargetOutOfBlocks",
                ),
                Panel(
                    "Prefix cache hits",
                    "Of the tokens that sessions brought without KV of their own, those whose KV was cached.",
                    (Query(ratio(rate(of.KV_REUSED_TOKENS), rate(of.KV_PROMPT_TOKENS)), "hits"),),
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Evictions",
                    "Cached blocks a second whose content went to make room.",
                    (Query(rate(of.EVICTIONS, "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Preemptions",
                    "Sessions a second that had to stop in mid-item: for older ones, or for want of blocks.",
                    (Query(rate(of.PREEMPTIONS, "instance"), "{{instance}}"),),
                    runbook="GalleyTargetOutOfBlocks",
                ),
                Panel(
                    "Out of blocks",
                    "Items a second that were put off, refused or preempted for want of blocks.",
                    (Query(rate(of.OUT_OF_BLOCKS, "instance"), "{{instance}}"),),
                    runbook="GalleyTargetOutOfBlocks",
                ),
                Panel(
                    "Cache misses",
                    "Items a second that built on a prefix which was not held.",
                    (Query(rate(of.KV_MISSES, "instance"), "{{instance}}"),),
                ),
            ),
        ),
    ),
)

"""What becomes of calls, and of the sessions behind them."""

from __future__ import annotations

from galley.common.metrics import catalogue as of
from scripts.monitoring.grafana import Dashboard, Panel, Query, Row
from scripts.monitoring.overview import quantiles
from scripts.monitoring.queries import gauge, heatmap, quantile, rate

SESSIONS = Dashboard(
    "sessions",
    "Galley: sessions",
    "What becomes of calls, and of the sessions behind them.",
    (
        Row(
            "Calls",
            (
                Panel(
                    "Open sessions",
                    "Places for streams that are taken, by gateway.",
                    (Query(gauge(of.SESSIONS_OPEN, "instance"), "{{instance}}"),),
                ),
                Panel(
                    "How calls end",
                    "A second, by status and whose fault it was.",
                    (Query(rate(of.STREAMS, "outcome", "fault"), "{{outcome}} ({{fault}})"),),
                    stacked=True,
                    runbook="GalleyErrorBudgetBurn",
                ),
                Panel(
                    "Refused at the door",
                    "Calls a second, by reason.",
                    (Query(rate(of.ADMISSION_REFUSED, "reason"), "{{reason}}"),),
                    stacked=True,
                    runbook="GalleyErrorBudgetBurn",
                ),
                Panel(
                    "Call duration",
                    "Of Generate and Resume, however they ended.",
                    quantiles(of.REQUEST_DURATION),
                    "s",
                ),
                Panel(
                    "Time to first token, p95",
                    "By what was asked.",
                    (
                        Query(
                            quantile(0.95, of.TIME_TO_FIRST_TOKEN, "gen_ai_operation_name"),
                            "{{gen_ai_operation_name}}",
                        ),
                    ),
                    "s",
                    runbook="GalleyTtftBudgetBurn",
                ),
                Panel(
                    "Time per output token, p95",
                    "By what was asked.",
                    (
                        Query(
                            quantile(0.95, of.TIME_PER_OUTPUT_TOKEN, "gen_ai_operation_name"),
                            "{{gen_ai_operation_name}}",
                        ),
                    ),
                    "s",
                    runbook="GalleyTimePerTokenBudgetBurn",
                ),
            ),
        ),
        Row(
            "Rounds and commits",
            (
                Panel("Round duration", "From verdict to verdict.", quantiles(of.ROUND_DURATION), "s"),
                Panel(
                    "Rounds by duration",
                    "How many took how long.",
                    (Query(heatmap(of.ROUND_DURATION), "{{le}}"),),
                    kind="heatmap",
                ),
                Panel(
                    "Commit duration",
                    "To the session store, repeats included.",
                    quantiles(of.COMMIT_DURATION),
                    "s",
                    runbook="GalleyCommitSlow",
                ),
                Panel(
                    "Commits",
                    "A second, by what came of them.",
                    (Query(rate(of.COMMIT_DURATION, "outcome"), "{{outcome}}"),),
                    stacked=True,
                ),
                Panel(
                    "Calls to the store that were repeated",
                    "A second: it did not answer.",
                    (Query(rate(of.STORE_RETRIES), "repeats"),),
                    runbook="GalleyCommitSlow",
                ),
            ),
        ),
        Row(
            "What went wrong, and went on",
            (
                Panel(
                    "Resumes",
                    "Calls of Resume a second, by how they ended.",
                    (Query(rate(of.RESUMES, "outcome"), "{{outcome}}"),),
                    stacked=True,
                ),
                Panel(
                    "Failovers",
                    "Sessions a second that went to another replica.",
                    (Query(rate(of.FAILOVERS, "pool", "reason"), "{{pool}} {{reason}}"),),
                    stacked=True,
                    runbook="GalleyFailoverRateHigh",
                ),
                Panel(
                    "Cache misses",
                    "Items a second whose replica lacked what it was thought to hold.",
                    (Query(rate(of.CACHE_MISSES, "pool"), "{{pool}}"),),
                ),
                Panel(
                    "Client stalls",
                    "Times a second that a client left its stream unread for a second or longer.",
                    (Query(rate(of.CLIENT_STALLS), "stalls"),),
                ),
            ),
        ),
    ),
)

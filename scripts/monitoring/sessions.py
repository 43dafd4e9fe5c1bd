"""Dashboard of calls, rounds, commits and recoveries."""

from __future__ import annotations

from galley.common.metrics import catalogue as of
from scripts.monitoring.grafana import Dashboard, Panel, Query, Row
from scripts.monitoring.overview import quantiles
from scripts.monitoring.queries import gauge, heatmap, increase, quantile, rate, ratio

_LOOSE = 'build="other"'


def _share_of_differing(window: str) -> str:
    """Return the share of differing ones in the audited tokens of other than deterministic builds.

    It is 0 without any.
    """
    differing = increase(of.AUDIT_TOKENS, window, where=f'{_LOOSE}, result="differs"')
    audited = increase(of.AUDIT_TOKENS, window, where=_LOOSE)
    return ratio(differing, f"clamp_min({audited}, 1)")


SESSIONS = Dashboard(
    "sessions",
    "Galley: sessions",
    "Calls, rounds, commits and recoveries.",
    (
        Row(
            "Calls",
            (
                Panel(
                    "Open sessions",
                    "Sessions that hold an admission slot, by gateway.",
                    (Query(gauge(of.SESSIONS_OPEN, "instance"), "{{instance}}"),),
                    unit="none",
                    width=6,
                ),
                Panel(
                    "Slots in use",
                    "Share of each gateway's admission slots that are in use; at 1 it rejects calls.",
                    (
                        Query(
                            ratio(gauge(of.SESSIONS_OPEN, "instance"), gauge(of.SESSIONS_LIMIT, "instance")),
                            "{{instance}}",
                        ),
                    ),
                    "percentunit",
                    width=6,
                    max_value=1,
                    limits=(0.8, 1),
                    runbooks=("GalleyErrorBudgetBurn",),
                ),
                Panel(
                    "Finished calls",
                    "Calls per second, by status and fault.",
                    (Query(rate(of.STREAMS, "outcome", "fault"), "{{outcome}} ({{fault}})"),),
                    stacked=True,
                    runbooks=("GalleyErrorBudgetBurn",),
                    unit="reqps",
                    width=6,
                ),
                Panel(
                    "Rejected requests",
                    "Requests per second that admission rejected, by reason.",
                    (Query(rate(of.ADMISSION_REJECTED, "reason"), "{{reason}}"),),
                    stacked=True,
                    runbooks=("GalleyErrorBudgetBurn",),
                    unit="reqps",
                    limits=(0.1, 1),
                    width=6,
                ),
                Panel(
                    "Call duration",
                    "Duration of calls of Generate and Resume, with any status.",
                    quantiles(of.REQUEST_DURATION),
                    "s",
                ),
                Panel(
                    "Time to first token (p95)",
                    "From the call to the first token sent, for new sessions, by operation.",
                    (
                        Query(
                            quantile(0.95, of.TIME_TO_FIRST_TOKEN, "gen_ai_operation_name"),
                            "{{gen_ai_operation_name}}",
                        ),
                    ),
                    "s",
                    runbooks=("GalleyTtftBudgetBurn",),
                    limits=(0.5, 1),
                ),
                Panel(
                    "Time per output token (p95)",
                    "Mean time per token after the first, for finished streams, by operation.",
                    (
                        Query(
                            quantile(0.95, of.TIME_PER_OUTPUT_TOKEN, "gen_ai_operation_name"),
                            "{{gen_ai_operation_name}}",
                        ),
                    ),
                    "s",
                    runbooks=("GalleyTimePerTokenBudgetBurn",),
                    limits=(0.075, 0.1),
                ),
            ),
        ),
        Row(
            "Usage",
            (
                Panel(
                    "Prompt and output tokens",
                    "Tokens per second: prompts of new sessions, and confirmed tokens.",
                    (Query(rate(of.PROMPT_TOKENS), "prompt"), Query(rate(of.CONFIRMED_TOKENS), "output")),
                    "suffix: tok/s",
                    width=12,
                ),
                Panel(
                    "Tokens by caller",
                    "Prompt and output tokens per second; by name if gateways count by principal.",
                    (Query(rate(of.USAGE_TOKENS, "principal", "direction"), "{{principal}} {{direction}}"),),
                    "suffix: tok/s",
                    width=12,
                    stacked=True,
                ),
            ),
        ),
        Row(
            "Rounds and commits",
            (
                Panel(
                    "Round duration",
                    "From one verdict to the next.",
                    quantiles(of.ROUND_DURATION),
                    "s",
                    limits=(0.25, 1),
                ),
                Panel(
                    "Rounds by duration",
                    "Number of rounds in each bucket of duration.",
                    (Query(heatmap(of.ROUND_DURATION), "{{le}}"),),
                    kind="heatmap",
                    unit="s",
                ),
                Panel(
                    "Commit duration",
                    "Commits to the session store, retries included.",
                    quantiles(of.COMMIT_DURATION),
                    "s",
                    runbooks=("GalleyCommitSlow",),
                    limits=(0.05, 0.1),
                ),
                Panel(
                    "Commits",
                    "Commits per second, by outcome.",
                    (Query(rate(of.COMMIT_DURATION, "outcome"), "{{outcome}}"),),
                    stacked=True,
                    unit="suffix: commits/s",
                    width=12,
                ),
                Panel(
                    "Session store retries",
                    "Calls per second that were repeated because the store did not respond.",
                    (Query(rate(of.STORE_RETRIES), "retries"),),
                    runbooks=("GalleyStoreDown", "GalleyCommitSlow"),
                    unit="suffix: calls/s",
                    limits=(0.1, 1),
                    width=12,
                ),
            ),
        ),
        Row(
            "Recoveries",
            (
                Panel(
                    "Resumes",
                    "Calls of Resume per second, by outcome.",
                    (Query(rate(of.RESUMES, "outcome"), "{{outcome}}"),),
                    stacked=True,
                    unit="reqps",
                    width=6,
                ),
                Panel(
                    "Failovers",
                    "Sessions per second that continued at another or a restarted replica.",
                    (Query(rate(of.FAILOVERS, "pool", "reason"), "{{pool}} {{reason}}"),),
                    stacked=True,
                    runbooks=("GalleyFailoverRateHigh",),
                    unit="suffix: sessions/s",
                    width=6,
                ),
                Panel(
                    "Cache misses",
                    "Requests per second to replicas that did not hold the expected tokens.",
                    (Query(rate(of.CACHE_MISSES, "pool"), "{{pool}}"),),
                    unit="reqps",
                    width=6,
                ),
                Panel(
                    "Client stalls",
                    "Stalls per second: a client did not read its stream for a second or longer.",
                    (Query(rate(of.CLIENT_STALLS), "stalls"),),
                    unit="suffix: stalls/s",
                    width=6,
                ),
            ),
        ),
        Row(
            "Audits",
            (
                Panel(
                    "Differing tokens",
                    "Tokens in the last hour that audits computed otherwise than the token log has them, by "
                    "build. Each one of a deterministic build is an incident.",
                    (Query(increase(of.AUDIT_TOKENS, "1h", "build", where='result="differs"'), "{{build}}"),),
                    unit="suffix: tokens",
                    limits=(1, 1),
                    runbooks=("GalleyAuditDiffers",),
                ),
                Panel(
                    "Audited tokens",
                    "Tokens in the last hour that audits computed again, by build.",
                    (Query(increase(of.AUDIT_TOKENS, "1h", "build"), "{{build}}"),),
                    unit="suffix: tokens",
                    stacked=True,
                ),
                Panel(
                    "Audits by verdict",
                    "Audited sessions in the last hour, by verdict.",
                    (Query(increase(of.AUDIT_SESSIONS, "1h", "verdict"), "{{verdict}}"),),
                    unit="suffix: sessions",
                    stacked=True,
                    runbooks=("GalleyAuditDamaged",),
                ),
                Panel(
                    "Differing tokens of other builds",
                    "Share of the audited tokens that differ, where tokens may depend on the batch: in the "
                    "last hour, and over a week as its baseline.",
                    (
                        Query(_share_of_differing("1h"), "last hour"),
                        Query(_share_of_differing("7d"), "baseline"),
                    ),
                    unit="percentunit",
                ),
                Panel(
                    "Computing time of audits",
                    "Seconds per second that targets compute for audits, over the last hour: 1 % is a "
                    "hundredth of one target.",
                    (Query(ratio(increase(of.AUDIT_TIME, "1h"), "3600"), "audits"),),
                    unit="percentunit",
                ),
                Panel(
                    "Skipped audits",
                    "Drawn sessions in the last hour that were not audited, or not to their end, by reason.",
                    (Query(increase(of.AUDIT_SKIPPED, "1h", "reason"), "{{reason}}"),),
                    unit="suffix: sessions",
                    stacked=True,
                    runbooks=("GalleyAuditBehind",),
                ),
                Panel(
                    "Sessions that wait for an audit",
                    "Finished sessions that wait until their target is idle, by gateway.",
                    (Query(gauge(of.AUDIT_WAITING, "instance"), "{{instance}}"),),
                    unit="suffix: sessions",
                    runbooks=("GalleyAuditBehind",),
                ),
            ),
        ),
    ),
)

"""What users feel, and whether all parts are there."""

from __future__ import annotations

from galley.common.metrics import catalogue as of
from galley.common.metrics.metric import Metric
from scripts.monitoring.grafana import Dashboard, Panel, Query, Row
from scripts.monitoring.queries import gauge, largest, left_s, quantile, rate, ratio

_SERVED = 'fault!="caller"'
_OURS = 'fault="ours"'

ERRORS = ratio(rate(of.STREAMS, where=_OURS), rate(of.STREAMS, where=_SERVED))
SPEED_UP = ratio(rate(of.PLAIN_TIME), rate(of.DECODE_TIME))
ACCEPTANCE = ratio(rate(of.ACCEPTED_TOKENS), rate(of.VERIFIED_TOKENS))


def _stat(title: str, description: str, expr: str, unit: str = "short") -> Panel:
    return Panel(title, description, (Query(expr),), unit, kind="stat", width=4)


def quantiles(metric: Metric) -> tuple[Query, ...]:
    """The usual three, with traces beside the last."""
    shares = (0.5, 0.95, 0.99)
    return tuple(
        Query(quantile(share, metric), f"p{share * 100:g}", exemplars=metric.exemplars and share == 0.99)
        for share in shares
    )


def _burn(alert: str, title: str, record: str, budget: float) -> Panel:
    return Panel(
        title,
        f"How many times as fast as planned the error budget is used up; at 1 it lasts for its 30 days. "
        f"Of the recording rules. Paged at 14.4, a ticket at 6: {alert}.",
        tuple(
            Query(f'{record}{window}{{namespace=~"$namespace"}} / {budget:g}', window)
            for window in ("5m", "1h", "6h")
        ),
        runbook=alert,
    )


OVERVIEW = Dashboard(
    "overview",
    "Galley: overview",
    "What users feel, whether all parts are there, and where to look next.",
    (
        Row(
            "Now",
            (
                _stat("Output tokens a second", "Confirmed tokens.", rate(of.CONFIRMED_TOKENS)),
                _stat("Live speed-up", "Plain decoding's estimated time over the real one.", SPEED_UP),
                _stat("Acceptance", "Of the verified draft tokens.", ACCEPTANCE, "percentunit"),
                _stat("Open sessions", "Places for streams that are taken.", gauge(of.SESSIONS_OPEN)),
                _stat(
                    "Errors of ours",
                    "Of the calls that were not their callers' fault.",
                    ERRORS,
                    "percentunit",
                ),
                _stat("First token, p95", "From the call.", quantile(0.95, of.TIME_TO_FIRST_TOKEN), "s"),
            ),
        ),
        Row(
            "What users feel",
            (
                Panel(
                    "Time to first token",
                    "From the call to the first token handed over, of sessions that began with it.",
                    quantiles(of.TIME_TO_FIRST_TOKEN),
                    "s",
                    runbook="GalleyTtftBudgetBurn",
                ),
                Panel(
                    "Time per output token",
                    "After the first one, of answers that came to their end.",
                    quantiles(of.TIME_PER_OUTPUT_TOKEN),
                    "s",
                    runbook="GalleyTimePerTokenBudgetBurn",
                ),
                Panel(
                    "Errors of ours",
                    "Of the calls that did not fail by their callers' fault, those that failed by ours.",
                    (Query(ERRORS, "errors"),),
                    "percentunit",
                    runbook="GalleyErrorBudgetBurn",
                ),
                _burn("GalleyTtftBudgetBurn", "Burn rate: first tokens", "galley:ttft_slow:ratio_rate", 0.01),
                _burn(
                    "GalleyTimePerTokenBudgetBurn",
                    "Burn rate: time per token",
                    "galley:time_per_token_slow:ratio_rate",
                    0.01,
                ),
                _burn("GalleyErrorBudgetBurn", "Burn rate: errors", "galley:errors:ratio_rate", 0.005),
            ),
        ),
        Row(
            "Parts",
            (
                Panel(
                    "Replicas",
                    "That the gateways know of, as the gateway that knows most of them does.",
                    (Query(largest(of.REPLICAS, "pool", "state"), "{{pool}} {{state}}"),),
                    runbook="GalleyDraftPoolDown",
                ),
                Panel(
                    "Breakers",
                    "Of each draft, at the gateway that trusts it least: 0 closed, 1 half open, 2 open.",
                    (Query(largest(of.BREAKER_STATE, "pool", "replica"), "{{pool}} {{replica}}"),),
                    most=2,
                    runbook="GalleyDraftPoolDown",
                ),
                Panel(
                    "Failovers",
                    "Sessions a second that another replica, or another life of the same, went on with.",
                    (Query(rate(of.FAILOVERS, "pool", "reason"), "{{pool}} {{reason}}"),),
                    stacked=True,
                    runbook="GalleyFailoverRateHigh",
                ),
                Panel(
                    "Commits",
                    "How long the session store takes. No token leaves before its commit.",
                    quantiles(of.COMMIT_DURATION),
                    "s",
                    runbook="GalleyCommitSlow",
                ),
                Panel(
                    "Queue age at targets",
                    "How long items waited for the pass that fed their first row.",
                    quantiles(of.QUEUE_AGE),
                    "s",
                    runbook="GalleyQueueAgeHigh",
                ),
                Panel(
                    "KV blocks in use",
                    "Share of each target's KV pool that live sessions hold.",
                    (
                        Query(
                            ratio(
                                gauge(of.KV_BLOCKS, "instance", where='state="used"'),
                                gauge(of.KV_BLOCKS, "instance"),
                            ),
                            "{{instance}}",
                        ),
                    ),
                    "percentunit",
                    most=1,
                    runbook="GalleyTargetOutOfBlocks",
                ),
                Panel(
                    "Certificates: time left",
                    "Until the certificate ends that each server shows, or that gateways show replicas.",
                    (
                        Query(left_s(of.SERVED_CERTIFICATE_EXPIRY, "instance"), "{{instance}}"),
                        Query(left_s(of.PEER_CERTIFICATE_EXPIRY, "instance"), "{{instance}} to peers"),
                    ),
                    "s",
                    runbook="GalleyCertificateExpires",
                ),
                Panel(
                    "Builds",
                    "What runs.",
                    (Query(gauge(of.BUILD, "service", "version")),),
                    kind="table",
                    width=24,
                ),
            ),
        ),
    ),
)

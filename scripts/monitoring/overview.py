"""Dashboard of user-visible figures and of the state of all replicas."""

from __future__ import annotations

from galley.common.metrics import catalogue as of
from galley.common.metrics.metric import Metric
from scripts.monitoring.grafana import Dashboard, Panel, Query, Row
from scripts.monitoring.queries import gauge, largest, left_s, quantile, rate, ratio

_SERVED = 'fault!="caller"'
_OURS = 'fault="server"'

ERRORS = ratio(rate(of.STREAMS, where=_OURS), rate(of.STREAMS, where=_SERVED))
SPEED_UP = ratio(rate(of.PLAIN_TIME), rate(of.DECODE_TIME))
ACCEPTANCE = ratio(rate(of.ACCEPTED_TOKENS), rate(of.VERIFIED_TOKENS))


def _stat(title: str, description: str, expr: str, unit: str = "short") -> Panel:
    return Panel(title, description, (Query(expr),), unit, kind="stat", width=4)


def quantiles(metric: Metric) -> tuple[Query, ...]:
    """Return p50, p95 and p99, with exemplars beside the last."""
    shares = (0.5, 0.95, 0.99)
    return tuple(
        Query(quantile(share, metric), f"p{share * 100:g}", exemplars=metric.exemplars and share == 0.99)
        for share in shares
    )


def _burn(alert: str, title: str, record: str, budget: float) -> Panel:
    return Panel(
        title,
        f"Rate at which the error budget is used, as a multiple of the rate that lasts 30 days. "
        f"{alert} pages at 14.4 and opens a ticket at 6.",
        tuple(
            Query(f'{record}{window}{{namespace=~"$namespace"}} / {budget:g}', window)
            for window in ("5m", "1h", "6h")
        ),
        runbook=alert,
    )


OVERVIEW = Dashboard(
    "overview",
    "Galley: overview",
    "User-visible latency, errors and throughput, and the state of all replicas.",
    (
        Row(
            "Now",
            (
                _stat("Output tokens per second", "Confirmed tokens.", rate(of.CONFIRMED_TOKENS)),
                _stat(
                    "Live speed-up",
                    "Estimated time of plain decoding divided by the measured time.",
                    SPEED_UP,
                ),
                _stat(
                    "Acceptance rate",
                    "Accepted draft tokens divided by verified ones.",
                    ACCEPTANCE,
                    "percentunit",
                ),
                _stat("Open sessions", "Sessions that hold an admission slot.", gauge(of.SESSIONS_OPEN)),
                _stat(
                    "Server errors",
                    "Share of calls that failed by a server fault; calls with a caller fault are left out.",
                    ERRORS,
                    "percentunit",
                ),
                _stat(
                    "Time to first token (p95)",
                    "From the call to the first token sent.",
                    quantile(0.95, of.TIME_TO_FIRST_TOKEN),
                    "s",
                ),
            ),
        ),
        Row(
            "Objectives",
            (
                Panel(
                    "Time to first token",
                    "From the call to the first token sent, for new sessions.",
                    quantiles(of.TIME_TO_FIRST_TOKEN),
                    "s",
                    runbook="GalleyTtftBudgetBurn",
                ),
                Panel(
                    "Time per output token",
                    "Mean of each finished stream after its first token, without client stalls.",
                    quantiles(of.TIME_PER_OUTPUT_TOKEN),
                    "s",
                    runbook="GalleyTimePerTokenBudgetBurn",
                ),
                Panel(
                    "Server errors",
                    "Share of calls that failed by a server fault; calls with a caller fault are left out.",
                    (Query(ERRORS, "errors"),),
                    "percentunit",
                    runbook="GalleyErrorBudgetBurn",
                ),
                _burn(
                    "GalleyTtftBudgetBurn",
                    "Burn rate: time to first token",
                    "galley:ttft_slow:ratio_rate",
                    0.01,
                ),
                _burn(
                    "GalleyTimePerTokenBudgetBurn",
                    "Burn rate: time per output token",
                    "galley:time_per_token_slow:ratio_rate",
                    0.01,
                ),
                _burn("GalleyErrorBudgetBurn", "Burn rate: errors", "galley:errors:ratio_rate", 0.005),
            ),
        ),
        Row(
            "Replicas and dependencies",
            (
                Panel(
                    "Replicas",
                    "Replicas known to the gateways: the largest number that one gateway reports.",
                    (Query(largest(of.REPLICAS, "pool", "state"), "{{pool}} {{state}}"),),
                    runbook="GalleyDraftPoolDown",
                ),
                Panel(
                    "Circuit breakers",
                    "State for each draft, the worst of all gateways: 0 closed, 1 half open, 2 open.",
                    (Query(largest(of.BREAKER_STATE, "pool", "replica"), "{{pool}} {{replica}}"),),
                    max_value=2,
                    runbook="GalleyDraftPoolDown",
                ),
                Panel(
                    "Failovers",
                    "Sessions per second that continued at another or a restarted replica.",
                    (Query(rate(of.FAILOVERS, "pool", "reason"), "{{pool}} {{reason}}"),),
                    stacked=True,
                    runbook="GalleyFailoverRateHigh",
                ),
                Panel(
                    "Commit duration",
                    "Time of a commit to the session store. A token is sent only after its commit.",
                    quantiles(of.COMMIT_DURATION),
                    "s",
                    runbook="GalleyCommitSlow",
                ),
                Panel(
                    "Queue age at targets",
                    "Time from the arrival of a request to its first step.",
                    quantiles(of.QUEUE_AGE),
                    "s",
                    runbook="GalleyQueueAgeHigh",
                ),
                Panel(
                    "KV blocks in use",
                    "Share of each target's KV pool that open sessions use.",
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
                    max_value=1,
                    runbook="GalleyTargetOutOfBlocks",
                ),
                Panel(
                    "Certificates: time left",
                    "Time until the certificates of servers, and of gateways towards replicas, expire.",
                    (
                        Query(left_s(of.SERVED_CERTIFICATE_EXPIRY, "instance"), "{{instance}}"),
                        Query(left_s(of.PEER_CERTIFICATE_EXPIRY, "instance"), "{{instance}} to peers"),
                    ),
                    "s",
                    runbook="GalleyCertificateExpires",
                ),
            ),
        ),
        Row(
            "Versions",
            (
                Panel(
                    "Builds",
                    "Running versions, by service.",
                    (Query(gauge(of.BUILD, "service", "version")),),
                    kind="table",
                    width=24,
                ),
            ),
        ),
    ),
)

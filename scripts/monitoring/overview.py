"""Dashboard of user-visible figures and of the state of all replicas."""

from __future__ import annotations

from galley.common.metrics import catalogue as of
from galley.common.metrics.metric import Metric
from scripts.monitoring.grafana import Dashboard, Panel, Query, Row
from scripts.monitoring.queries import RELEASE, gauge, largest, left_s, process, quantile, rate, ratio

_SERVED = 'fault!="caller"'
_OURS = 'fault="server"'

ERRORS = ratio(rate(of.STREAMS, where=_OURS), rate(of.STREAMS, where=_SERVED))
SPEED_UP = ratio(rate(of.PLAIN_TIME), rate(of.DECODE_TIME))
ACCEPTANCE = ratio(rate(of.ACCEPTED_TOKENS), rate(of.VERIFIED_TOKENS))


def _stat(
    title: str, description: str, expr: str, unit: str = "short", limits: tuple[float, float] | None = None
) -> Panel:
    return Panel(title, description, (Query(expr),), unit, kind="stat", width=4, limits=limits)


def quantiles(metric: Metric) -> tuple[Query, ...]:
    """Return p50, p95 and p99, with exemplars beside the last."""
    shares = (0.5, 0.95, 0.99)
    return tuple(
        Query(quantile(share, metric), f"p{share * 100:g}", exemplars=metric.exemplars and share == 0.99)
        for share in shares
    )


def _burn(alert: str, title: str, record: str) -> Panel:
    return Panel(
        title,
        "How fast the error budget of 30 days is used; 1 uses it up in 30 days. "
        f"By default {alert} pages at 14.4 and opens a ticket at 6.",
        (Query(f"max by (window) ({record}{{{RELEASE}}})", "{{window}}"),),
        "suffix:×",
        limits=(6, 14.4),
        runbooks=(alert,),
    )


OVERVIEW = Dashboard(
    "overview",
    "Galley: overview",
    "User-visible latency, errors and throughput, and the state of all replicas.",
    (
        Row(
            "Now",
            (
                _stat(
                    "Output tokens per second",
                    "Confirmed tokens.",
                    rate(of.CONFIRMED_TOKENS),
                    unit="suffix: tok/s",
                ),
                _stat(
                    "Live speed-up",
                    "Estimated time of plain decoding divided by the measured time.",
                    SPEED_UP,
                    unit="suffix:×",
                    limits=(1, 0.95),
                ),
                _stat(
                    "Acceptance rate",
                    "Accepted draft tokens divided by verified ones.",
                    ACCEPTANCE,
                    "percentunit",
                    limits=(0.3, 0.1),
                ),
                _stat(
                    "Open sessions",
                    "Sessions that hold an admission slot.",
                    gauge(of.SESSIONS_OPEN),
                    unit="none",
                ),
                _stat(
                    "Server errors",
                    "Share of calls that failed by a server fault; calls with a caller fault are left out.",
                    ERRORS,
                    "percentunit",
                    limits=(0.005, 0.03),
                ),
                _stat(
                    "Time to first token (p95)",
                    "From the call to the first token sent.",
                    quantile(0.95, of.TIME_TO_FIRST_TOKEN),
                    "s",
                    limits=(0.5, 1),
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
                    runbooks=("GalleyTtftBudgetBurn",),
                    limits=(0.5, 1),
                ),
                Panel(
                    "Time per output token",
                    "Mean of each finished stream after its first token, without client stalls.",
                    quantiles(of.TIME_PER_OUTPUT_TOKEN),
                    "s",
                    runbooks=("GalleyTimePerTokenBudgetBurn",),
                    limits=(0.075, 0.1),
                ),
                Panel(
                    "Server errors",
                    "Share of calls that failed by a server fault; calls with a caller fault are left out.",
                    (Query(ERRORS, "errors"),),
                    "percentunit",
                    runbooks=("GalleyErrorBudgetBurn",),
                    limits=(0.005, 0.03),
                ),
                _burn("GalleyTtftBudgetBurn", "Burn rate: time to first token", "galley:ttft:burn_rate"),
                _burn(
                    "GalleyTimePerTokenBudgetBurn",
                    "Burn rate: time per output token",
                    "galley:time_per_token:burn_rate",
                ),
                _burn("GalleyErrorBudgetBurn", "Burn rate: errors", "galley:errors:burn_rate"),
            ),
        ),
        Row(
            "Replicas and dependencies",
            (
                Panel(
                    "Running processes",
                    "Processes that Prometheus scrapes, by service.",
                    (Query(gauge(of.BUILD, "service"), "{{service}}"),),
                    unit="none",
                    runbooks=("GalleyMetricsAbsent", "GalleyGatewayPoolDown"),
                ),
                Panel(
                    "Replicas",
                    "Replicas known to the gateways: the largest number that one gateway reports.",
                    (Query(largest(of.REPLICAS, "pool", "state"), "{{pool}} {{state}}"),),
                    runbooks=("GalleyTargetPoolDown", "GalleyDraftPoolDown", "GalleyReplicaDown"),
                    unit="none",
                ),
                Panel(
                    "Circuit breakers",
                    "State for each draft, the worst of all gateways.",
                    (Query(largest(of.BREAKER_STATE, "pool", "replica"), "{{pool}} {{replica}}"),),
                    max_value=2,
                    runbooks=("GalleyDraftPoolDown",),
                    unit="none",
                    limits=(1, 2),
                    states=("closed", "half open", "open"),
                ),
                Panel(
                    "Failovers",
                    "Sessions per second that continued at another or a restarted replica.",
                    (Query(rate(of.FAILOVERS, "pool", "reason"), "{{pool}} {{reason}}"),),
                    stacked=True,
                    runbooks=("GalleyFailoverRateHigh",),
                    unit="suffix: sessions/s",
                ),
                Panel(
                    "Commit duration",
                    "Time of a commit to the session store. A token is sent only after its commit.",
                    quantiles(of.COMMIT_DURATION),
                    "s",
                    runbooks=("GalleyCommitSlow",),
                    limits=(0.05, 0.1),
                ),
                Panel(
                    "Queue age at targets",
                    "Time from the arrival of a request to its first step.",
                    quantiles(of.QUEUE_AGE),
                    "s",
                    runbooks=("GalleyQueueAgeHigh",),
                    limits=(0.5, 1),
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
                    runbooks=("GalleyTargetOutOfBlocks",),
                    limits=(0.85, 0.95),
                    width=12,
                ),
                Panel(
                    "Certificates: time left",
                    "Time until the certificates of servers, and of gateways towards replicas, expire.",
                    (
                        Query(left_s(of.SERVED_CERTIFICATE_EXPIRY, "instance"), "{{instance}}"),
                        Query(left_s(of.PEER_CERTIFICATE_EXPIRY, "instance"), "{{instance}} to peers"),
                    ),
                    "s",
                    runbooks=("GalleyCertificateExpires",),
                    limits=(604800, 86400),
                    width=12,
                ),
            ),
        ),
        Row(
            "Processes",
            (
                Panel(
                    "CPU",
                    "Cores that each process uses.",
                    (Query(process(of.PROCESS_CPU, is_rate=True), "{{instance}}"),),
                    "suffix: cores",
                ),
                Panel(
                    "Memory",
                    "Resident memory of each process.",
                    (Query(process(of.PROCESS_RESIDENT), "{{instance}}"),),
                    "bytes",
                ),
                Panel(
                    "Time since start",
                    "A line that falls to 0 is a restart.",
                    (Query(f"time() - {process(of.PROCESS_START)}", "{{instance}}"),),
                    "s",
                ),
                Panel(
                    "Builds",
                    "Running versions, by service.",
                    (Query(gauge(of.BUILD, "service", "version")),),
                    kind="table",
                    width=24,
                    unit="none",
                ),
            ),
        ),
    ),
)

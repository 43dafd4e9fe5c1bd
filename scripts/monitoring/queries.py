"""PromQL over the catalogue of metrics; a query with an unknown metric or label is an error."""

from __future__ import annotations

import re

from galley.common.metrics.catalogue import BUILD
from galley.common.metrics.metric import Kind, Metric

WINDOW = "$__rate_interval"
# Labels of all metrics: `instance` is set by the scrape, `le` by histograms.
_EVERYWHERE = frozenset({"instance", "le"})


# Variables of all dashboards that choose series by labels of metrics, and the labels.
_VARIABLES = {"workload": ("workload",), "model": ("model", "gen_ai_request_model")}
RELEASE = 'namespace=~"$namespace", release=~"$release"'
CHOSEN = f'{RELEASE}, job=~"$job", instance=~"$instance"'


def _selected(metric: Metric, series: str, where: str = "") -> str:
    """Return the selector of a series by the chosen variables; `where` is a further label matcher."""
    for matcher in filter(None, where.split(", ")):
        _check(metric, re.split("[!=]", matcher, maxsplit=1)[0])
    own = {label.prometheus for label in metric.labels}
    chosen = [
        f'{label}=~"${name}"' for name, labels in _VARIABLES.items() for label in labels if label in own
    ]
    return f"{series}{{{', '.join([CHOSEN, *chosen, *filter(None, [where])])}}}"


def _check(metric: Metric, *labels: str) -> None:
    known = {label.prometheus for label in metric.labels} | _EVERYWHERE
    if unknown := set(labels) - known:
        raise ValueError(f"{metric.name} has no {', '.join(sorted(unknown))}")


def _sum(expr: str, by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)}) ({expr})" if by else f"sum({expr})"


def rate(metric: Metric, *by: str, where: str = "") -> str:
    """Return the increase per second of a counter, or of the number of a histogram's observations."""
    _check(metric, *by)
    series = metric.prometheus + ("_count" if metric.kind is Kind.HISTOGRAM else "_total")
    return _sum(f"rate({_selected(metric, series, where)}[{WINDOW}])", by)


def increase(metric: Metric, window: str, *by: str, where: str = "") -> str:
    """Return the increase of a counter over a fixed window, for what is too rare for a rate."""
    _check(metric, *by)
    return _sum(f"increase({_selected(metric, f'{metric.prometheus}_total', where)}[{window}])", by)


def gauge(metric: Metric, *by: str, where: str = "") -> str:
    """Return the sum of a gauge over all replicas; for an info metric, the number of replicas."""
    _check(metric, *by)
    return _sum(_selected(metric, metric.series[0], where), by)


def process(metric: Metric, *, is_rate: bool = False) -> str:
    """Return a figure of each process; programs other than Galley's export these metrics too."""
    series = _selected(metric, metric.series[0])
    value = f"rate({series}[{WINDOW}])" if is_rate else series
    return f"max by (instance) ({value} and on (namespace, instance) {_selected(BUILD, BUILD.series[0])})"


def largest(metric: Metric, *by: str) -> str:
    """Return the largest value of a gauge over all replicas, for each value of the labels `by`."""
    _check(metric, *by)
    return f"max by ({', '.join(by)}) ({_selected(metric, metric.prometheus)})"


def left_s(metric: Metric, *by: str) -> str:
    """Return the seconds until the earliest of the times that a gauge holds."""
    _check(metric, *by)
    return f"min by ({', '.join(by)}) ({_selected(metric, metric.prometheus)}) - time()"


def ratio(part: str, whole: str) -> str:
    """Return the ratio of two expressions."""
    return f"{part} / {whole}"


def mean(metric: Metric, *by: str) -> str:
    """Return the mean of a histogram's observations."""
    _check(metric, *by)
    total = _sum(f"rate({_selected(metric, f'{metric.prometheus}_sum')}[{WINDOW}])", by)
    return ratio(total, rate(metric, *by))


def quantile(share: float, metric: Metric, *by: str) -> str:
    """Return a quantile of a histogram; `share` lies between 0 and 1."""
    _check(metric, *by)
    buckets = f"rate({_selected(metric, f'{metric.prometheus}_bucket')}[{WINDOW}])"
    return f"histogram_quantile({share}, {_sum(buckets, (*by, 'le'))})"


def heatmap(metric: Metric) -> str:
    """Return the increase of a histogram by bucket."""
    return _sum(f"increase({_selected(metric, f'{metric.prometheus}_bucket')}[{WINDOW}])", ("le",))

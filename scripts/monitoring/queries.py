"""PromQL over the catalogue, so that no query can name a metric or a label that there is not."""

from __future__ import annotations

from galley.common.metrics.metric import Kind, Metric

WINDOW = "$__rate_interval"
# Set by the scrape, or by the histogram itself.
_EVERYWHERE = frozenset({"instance", "le"})


def _selected(metric: Metric, series: str, where: str = "") -> str:
    """The series in the namespaces that are looked at; `where` is a further matcher of its own labels."""
    if where:
        _check(metric, where.split("=", maxsplit=1)[0].rstrip("!"))
    return series + '{namespace=~"$namespace"' + (f", {where}" if where else "") + "}"


def _check(metric: Metric, *labels: str) -> None:
    known = {label.prometheus for label in metric.labels} | _EVERYWHERE
    if unknown := set(labels) - known:
        raise ValueError(f"{metric.name} has no {', '.join(sorted(unknown))}")


def _sum(expr: str, by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)}) ({expr})" if by else f"sum({expr})"


def rate(metric: Metric, *by: str, where: str = "") -> str:
    """Of a counter, a second; of a histogram, how many observations."""
    _check(metric, *by)
    series = metric.prometheus + ("_count" if metric.kind is Kind.HISTOGRAM else "_total")
    return _sum(f"rate({_selected(metric, series, where)}[{WINDOW}])", by)


def gauge(metric: Metric, *by: str, where: str = "") -> str:
    """Of all replicas together; of an info, how many say so."""
    _check(metric, *by)
    return _sum(_selected(metric, metric.series[0], where), by)


def largest(metric: Metric, *by: str) -> str:
    """The gauge's largest value of each."""
    _check(metric, *by)
    return f"max by ({', '.join(by)}) ({_selected(metric, metric.prometheus)})"


def left_s(metric: Metric, *by: str) -> str:
    """How long the first of the moments that a gauge tells is away."""
    _check(metric, *by)
    return f"min by ({', '.join(by)}) ({_selected(metric, metric.prometheus)}) - time()"


def ratio(part: str, whole: str) -> str:
    """Of two rates."""
    return f"{part} / {whole}"


def mean(metric: Metric, *by: str) -> str:
    """Of what a histogram has observed."""
    _check(metric, *by)
    total = _sum(f"rate({_selected(metric, f'{metric.prometheus}_sum')}[{WINDOW}])", by)
    return ratio(total, rate(metric, *by))


def quantile(share: float, metric: Metric, *by: str) -> str:
    """Of a histogram."""
    _check(metric, *by)
    buckets = f"rate({_selected(metric, f'{metric.prometheus}_bucket')}[{WINDOW}])"
    return f"histogram_quantile({share}, {_sum(buckets, (*by, 'le'))})"


def heatmap(metric: Metric) -> str:
    """Observations by bucket."""
    return _sum(f"increase({_selected(metric, f'{metric.prometheus}_bucket')}[{WINDOW}])", ("le",))

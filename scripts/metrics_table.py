"""Write the tables of metrics into FILE, between its markers: `python -m scripts.metrics_table FILE`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from galley.common.metrics.catalogue import METRICS
from galley.common.metrics.labels import SERVICES
from galley.common.metrics.metric import Label, Metric
from scripts.between import write_between

BEGIN, END = "<!-- metrics: begin; written by `make metrics` -->\n", "<!-- metrics: end -->\n"
_TITLES = {
    "gateway": "Gateway",
    "draft": "Draft",
    "target": "Target",
}
_OF_ALL = [metric for metric in METRICS if metric.services == SERVICES]


def main() -> None:
    """Replace the tables; exit 1 if FILE has no markers."""
    (file,) = (Path(name) for name in sys.argv[1:])
    write_between(file, BEGIN, END, _tables())


def _tables() -> Iterator[str]:
    for service in SERVICES:
        yield f"\n### {_TITLES[service]}\n"
        its = [metric for metric in METRICS if metric.services[0] == service and metric not in _OF_ALL]
        yield from _table(its)
    yield "\n### All services\n"
    yield from _table(_OF_ALL)
    yield "\n### Labels\n"
    yield "| label | metrics | values | description |"
    yield "|---|---|---|---|"
    for label, metrics in _labels().items():
        names = ", ".join(f"`{metric.name}`" for metric in metrics)
        yield f"| `{label.name}` | {names} | {label.bound} | {label.description} |"


def _table(metrics: list[Metric]) -> Iterator[str]:
    yield "| metric | in Prometheus | kind, unit | labels | description |"
    yield "|---|---|---|---|---|"
    for metric in metrics:
        labels = ", ".join(f"`{label.name}`" for label in metric.labels)
        kind = metric.kind.value + (f", {metric.unit}" if metric.unit else "")
        name = metric.series[0] if len(metric.series) == 1 else metric.prometheus
        yield f"| `{metric.name}` | `{name}` | {kind} | {labels} | {_what(metric)} |"


def _what(metric: Metric) -> str:
    parts = [metric.description]
    if metric.buckets:
        parts.append("Buckets: " + ", ".join(f"{bound:g}" for bound in metric.buckets) + ".")
    if metric.exemplars:
        parts.append("With exemplars.")
    return " ".join(parts)


def _labels() -> dict[Label, list[Metric]]:
    labels: dict[Label, list[Metric]] = {}
    for metric in METRICS:
        for label in metric.labels:
            labels.setdefault(label, []).append(metric)
    return labels


if __name__ == "__main__":
    main()

"""Write the tables of metrics into FILE, between its markers: `python scripts/metrics_table.py FILE`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from galley.common.metrics.metric import Label, Metric

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from galley.common.metrics.catalogue import METRICS  # found by the line above
from galley.common.metrics.labels import SERVICES

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
    text = file.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise SystemExit(f"{file}: must contain the markers of the tables")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    file.write_text(before + BEGIN + "\n".join(_tables()) + "\n" + END + after, encoding="utf-8")


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
    yield ""


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

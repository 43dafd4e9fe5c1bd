"""The names of metrics and labels that queries, rules, dashboards and runbooks use, and those that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from galley.common.metrics.catalogue import METRICS
from galley.common.metrics.metric import Metric
from galley.core import names

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "galley.rules.yaml"
DASHBOARDS = ROOT / "helm" / "galley" / "files" / "dashboards"
RUNBOOKS = ROOT / "docs" / "runbooks"

# Labels that the scrape, Prometheus, histograms or rules add.
EVERYWHERE = frozenset(
    {"namespace", "release", "app_kubernetes_io_instance", "instance", "job", "le", "window"}
    | {"severity", "alertname"}
)
SERIES: dict[str, Metric] = {name: metric for metric in METRICS for name in metric.series}
FAMILIES: dict[str, Metric] = {metric.prometheus: metric for metric in METRICS}
"""Metrics by family name, which documents use and queries cannot."""
TRACED = frozenset(value for name, value in vars(names).items() if name.isupper())

# A word in single quotes is a key of the store.
_NAME = re.compile(r"(?<![\w:.$'\"])((?:galley|gen_ai)[_:][\w:]*)\s*(?:\{([^}]*)\})?")
_GROUPED = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')


@dataclass(frozen=True)
class Rule:
    name: str
    expr: str
    is_alert: bool
    severity: str
    annotations: dict[str, str]


@cache
def rules() -> tuple[Rule, ...]:
    document = yaml.safe_load(RULES.read_text())
    return tuple(
        Rule(
            rule.get("alert") or rule["record"],
            rule["expr"],
            "alert" in rule,
            rule.get("labels", {}).get("severity", ""),
            rule.get("annotations", {}),
        )
        for group in document["groups"]
        for rule in group["rules"]
    )


def alerts() -> tuple[Rule, ...]:
    return tuple(rule for rule in rules() if rule.is_alert)


def dashboards() -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def panels(dashboard: Any) -> list[Any]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def chosen(expr: str, rate_interval: str) -> str:
    """Return a panel's query as Grafana sends it, with All for every variable."""
    return re.sub(r'"\$\w+"', '".*"', expr.replace("$__rate_interval", rate_interval))


def unknown_names(text: str, series: Mapping[str, Metric] = SERIES) -> Iterator[str]:
    recorded = {rule.name for rule in rules() if not rule.is_alert}
    labels = {label.prometheus for metric in METRICS for label in metric.labels} | EVERYWHERE
    for name, matchers in _NAME.findall(text):
        if name in recorded or name in labels:
            continue
        if name not in series:
            yield name
            continue
        yield from _unknown_matchers(series[name], matchers)
    for grouped in _GROUPED.findall(text):
        yield from {label.strip() for label in grouped.split(",") if label.strip()} - labels


def _unknown_matchers(metric: Metric, matchers: str) -> Iterator[str]:
    labels = {label.prometheus: label for label in metric.labels}
    for name, operator, value in _MATCHER.findall(matchers):
        if name in EVERYWHERE:
            bounds = value.replace("[.]", ".").split("|") if name == "le" else ()
            yield from (f"{metric.name} le={bound}" for bound in bounds if float(bound) not in metric.buckets)
        elif name not in labels:
            yield f"{metric.name} {name}"
        elif "~" not in operator and labels[name].values and value not in labels[name].values:
            yield f"{metric.name} {name}={value}"


_COMPARED = re.compile(r"(<=|>=|==|!=|<|>)(?!\s*bool)")


def always(expr: str) -> str:
    """Return an alert's expression with a value whether or not it fires, if its series are there."""
    parts = re.split(r"(\{[^}]*\})", expr.replace("absent(", "count(").replace(" unless ", " and "))
    return "".join(part if part.startswith("{") else _COMPARED.sub(r"\1 bool", part) for part in parts)


@dataclass(frozen=True)
class Named:
    metrics: frozenset[Metric]
    signs: frozenset[str]


def _split_blocks(page: str) -> list[str]:
    """Return the fenced blocks of a page, and at the end all that is outside of them."""
    parts = page.split("```")
    return [*parts[1::2], "".join(parts[::2])]


def named_by(alert: str) -> Named:
    *blocks, prose = _split_blocks((RUNBOOKS / f"{alert}.md").read_text())
    words = re.findall(r"`([^`]+)`", prose)
    series = {name for text in (*words, *blocks) for name, _ in _NAME.findall(text)}
    known = {**SERIES, **FAMILIES}
    return Named(
        frozenset(known[name] for name in series if name in known),
        frozenset(word for word in words if word in TRACED),
    )

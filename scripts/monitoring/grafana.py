"""Dashboards as plain values, and what Grafana 11 imports of them (`tests/repo/test_dashboards.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WIDTH = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One line, or several by the labels that the legend names; `exemplars` show traces beside it."""

    expr: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is one of Grafana's names; `most` bounds the axis; a `runbook` is linked by its alert's name."""

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    most: float | None = None
    runbook: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`name` is that of its file, and of its links."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...] = field(default_factory=tuple)


def as_json(dashboard: Dashboard) -> dict[str, Any]:
    """What Grafana imports."""
    return {
        "uid": f"galley-{dashboard.name}",
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["galley"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "title": "Galley",
                "type": "dashboards",
                "tags": ["galley"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": _variables()},
        "panels": _panels(dashboard.rows),
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "namespace",
            "label": "Namespace",
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": "label_values(galley_build_info, namespace)", "refId": "namespace"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
        {
            "name": "runbooks",
            "label": "Runbooks at",
            "type": "textbox",
            "query": "docs/runbooks",
            "current": {"text": "docs/runbooks", "value": "docs/runbooks"},
        },
    ]


def _panels(rows: tuple[Row, ...]) -> list[dict[str, Any]]:
    """Each row's panels from left to right, going on below where there is no more room."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        panels.append(_heading(row.title, len(panels) + 1, y))
        y, x, height = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + height
            height = 4 if panel.kind == "stat" else 8
            place = {"x": x, "y": y, "w": panel.width, "h": height}
            panels.append(_panel(panel, len(panels) + 1, place))
            x += panel.width
        y += height
    return panels


def _heading(title: str, number: int, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": _custom(panel)}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [_target(panel, query, index) for index, query in enumerate(panel.queries)],
        "links": _links(panel.runbook),
    }


def _custom(panel: Panel) -> dict[str, Any]:
    if panel.kind != "timeseries":
        return {}
    return {
        "fillOpacity": 40 if panel.stacked else 5,
        "lineWidth": 1,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none"},
    }


def _options(kind: str) -> dict[str, Any]:
    match kind:
        case "stat":
            reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {"colorMode": "value", "graphMode": "area", "reduceOptions": reduced}
        case "heatmap":
            return {
                "calculate": False,
                "yAxis": {"unit": "s"},
                "color": {"mode": "scheme", "scheme": "Blues", "steps": 64},
            }
        case "table":
            return {"showHeader": True}
        case _:
            legend = {
                "showLegend": True,
                "displayMode": "table",
                "placement": "bottom",
                "calcs": ["mean", "lastNotNull"],
            }
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def _target(panel: Panel, query: Query, index: int) -> dict[str, Any]:
    instant = panel.kind == "table"
    return {
        "refId": chr(ord("A") + index),
        "datasource": _DATASOURCE,
        "expr": query.expr,
        "legendFormat": query.legend,
        "exemplar": query.exemplars,
        "instant": instant,
        "range": not instant,
        "format": panel.kind if panel.kind in {"table", "heatmap"} else "time_series",
    }


def _links(runbook: str) -> list[dict[str, Any]]:
    if not runbook:
        return []
    return [{"title": f"Runbook: {runbook}", "url": f"${{runbooks}}/{runbook}.md", "targetBlank": True}]

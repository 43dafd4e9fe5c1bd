"""Describe dashboards as plain values, and convert them to Grafana 11's JSON by its Foundation SDK."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from scripts.monitoring.queries import RELEASE

_DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
# The variables of every dashboard, and the series that have the label of that name.
_CHOSEN_BY = {
    "namespace": "galley_build_info",
    "release": 'galley_build_info{namespace=~"$namespace"}',
    "job": f"galley_build_info{{{RELEASE}}}",
    "model": f"galley_verified_tokens_total{{{RELEASE}}}",
    "workload": f"galley_rounds_total{{{RELEASE}}}",
    "instance": f'galley_build_info{{{RELEASE}, job=~"$job"}}',
}
_HEIGHTS = {"stat": 4, "table": 5}
_FORMATS = {"table": PromQueryFormat.TABLE, "heatmap": PromQueryFormat.HEATMAP}

_Builder: TypeAlias = timeseries.Panel | stat.Panel | heatmap.Panel | table.Panel


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL query; the legend names labels as {{label}}. `exemplars` shows links to traces."""

    expr: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel. `unit` is a name of Grafana's; `max_value` bounds the axis; `runbooks` are names of alerts.

    `limits` are the values from which a figure is orange and red; if the second is lower, low values are bad.
    `states` name the values 0, 1, ….
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    max_value: float | None = None
    limits: tuple[float, float] | None = None
    states: tuple[str, ...] = ()
    runbooks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard; its file is <name>.json, its uid galley-<name>."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...] = field(default_factory=tuple)


def as_json(given: Dashboard) -> str:
    """Return the dashboard's JSON, as Grafana imports it."""
    built = (
        dashboard.Dashboard(given.title)
        .uid(f"galley-{given.name}")
        .description(given.description)
        .tags(["galley"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .link(
            dashboard.DashboardLink("Galley")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["galley"])
            .as_dropdown(True)  # the SDK's signature
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, metric in _CHOSEN_BY.items():
        built.with_variable(_variable(name, metric))
    built.with_variable(
        dashboard.TextBoxVariable("runbooks")
        .label("Runbooks at")
        .default_value("docs/runbooks")
        .current(VariableOption(text="docs/runbooks", value="docs/runbooks"))
    )
    number = 0
    for row in given.rows:
        built.with_row(dashboard.Row(row.title).id(number := number + 1))
        for panel in row.panels:
            built.with_panel(_panel(panel).id(number := number + 1))
    return json.dumps(built.build(), cls=JSONEncoder, indent=1, ensure_ascii=False)


def _variable(name: str, metric: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_DATASOURCE)
        .query({"query": f"label_values({metric}, {name})", "refId": name})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all"))
    )


def _panel(panel: Panel) -> Any:
    """Return a panel's builder; its base methods are the same for all kinds, but share no type."""
    built: Any = _of_kind(panel)
    built.title(panel.title).description(panel.description).unit(panel.unit).min(0)
    built.datasource(_DATASOURCE).span(panel.width).height(_HEIGHTS.get(panel.kind, 8))
    if panel.max_value is not None:
        built.max(panel.max_value)
    for index, query in enumerate(panel.queries):
        built.with_target(_target(panel, query, chr(ord("A") + index)))
    built.thresholds(_thresholds(panel.limits))
    if panel.states:
        names = {str(value): ValueMappingResult(text=text) for value, text in enumerate(panel.states)}
        built.mappings([ValueMap(options=names)])
    links = [
        dashboard.DashboardLink(f"Runbook: {name}").url(f"${{runbooks}}/{name}.md").target_blank(True)
        for name in panel.runbooks
    ]
    if links:
        built.links(links)
    return built


def _thresholds(limits: tuple[float, float] | None) -> dashboard.ThresholdsConfig:
    if limits is None:
        steps: list[tuple[float | None, str]] = [(None, "green")]
    elif limits[0] <= limits[1]:
        steps = [(None, "green"), (limits[0], "orange"), (limits[1], "red")]
    else:
        steps = [(None, "red"), (limits[1], "orange"), (limits[0], "green")]
    return (
        dashboard.ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value, color) for value, color in steps])
    )


def _of_kind(panel: Panel) -> _Builder:
    match panel.kind:
        case "stat":
            return (
                stat.Panel()
                .color_mode(BigValueColorMode.VALUE)
                .graph_mode(BigValueGraphMode.AREA)
                .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
            )
        case "heatmap":
            color = heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Blues").steps(64)
            return heatmap.Panel().calculate(False).y_axis(heatmap.YAxisConfig().unit("s")).color(color)
        case "table":
            return table.Panel().show_header(True)
    legend = (
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(LegendDisplayMode.TABLE)
        .placement(LegendPlacement.BOTTOM)
        .calcs(["mean", "lastNotNull"])
        # Outcomes that never occurred come last.
        .sort_by("Mean")
        .sort_desc(True)  # the SDK's signature
    )
    style = GraphThresholdsStyleMode.OFF if panel.limits is None else GraphThresholdsStyleMode.DASHED
    stacking = StackingMode.NORMAL if panel.stacked else StackingMode.NONE
    return (
        timeseries.Panel()
        .fill_opacity(40 if panel.stacked else 5)
        .line_width(1)
        .show_points(VisibilityMode.NEVER)
        .stacking(common.StackingConfig().mode(stacking))
        .thresholds_style(common.GraphThresholdsStyleConfig().mode(style))
        .legend(legend)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )


def _target(panel: Panel, query: Query, ref_id: str) -> prometheus.Dataquery:
    target = (
        prometheus.Dataquery()
        .ref_id(ref_id)
        .datasource(_DATASOURCE)
        .expr(query.expr)
        .legend_format(query.legend)
        .exemplar(query.exemplars)
        .format(_FORMATS.get(panel.kind, PromQueryFormat.TIME_SERIES))
    )
    return target.instant() if panel.kind == "table" else target.range()

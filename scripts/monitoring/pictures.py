"""Draw a dashboard's JSON as a picture, from the series that its queries have."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

_WIDTH_IN, _ROW_IN, _DPI = 12.0, 0.27, 88
_COLUMNS, _COLORS = 24, 96
_LEAST = 1e-6
_STEPS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_THRESHOLDS = {"green": "#3a9a4c", "orange": "#e0912f", "red": "#d0353f"}


@dataclass(frozen=True, slots=True)
class Series:
    """Labels of a series, and its values over time; a gap is NaN."""

    labels: Mapping[str, str]
    times_s: Sequence[float]
    values: Sequence[float]


Answers = Mapping[str, Sequence[Series]]
"""The series of each query."""


def draw(dashboard: Mapping[str, Any], answers: Answers) -> bytes:
    """Return a PNG of all panels in the places that the dashboard gives them."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"]) + 2
    figure = Figure(figsize=(_WIDTH_IN, rows * _ROW_IN), dpi=_DPI, facecolor="white")
    figure.text(0.01, 1 - 1.2 / rows, dashboard["title"], fontsize=13, weight="bold")
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        top = place["y"] + 2
        if panel["type"] == "row":
            figure.text(0.01, 1 - (top + 0.75) / rows, panel["title"], fontsize=10, weight="bold")
            continue
        # Room for title above, and for axis and legend below.
        above, below = (1.2, 1.9) if panel["type"] != "stat" else (1.2, 0.4)
        width = place["w"] / _COLUMNS
        box = (
            *(place["x"] / _COLUMNS + 0.04, 1 - (top + place["h"] - below) / rows),
            *(width - 0.055, (place["h"] - above - below) / rows),
        )
        axes = figure.add_axes(box)
        unit = _suffix(_unit(panel)).strip()
        name = panel["title"]
        if unit and unit not in name.lower() and panel["type"] == "timeseries":
            name += f" ({unit})"
        axes.set_title(name, fontsize=8, loc="left", pad=3)
        _draw_panel(axes, panel, answers)
    return _small(figure)


def _small(figure: Figure) -> bytes:
    drawn, packed = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(_COLORS).save(packed, "PNG", optimize=True)
    return packed.getvalue()


def _draw_panel(axes: Axes, panel: Mapping[str, Any], answers: Answers) -> None:
    axes.tick_params(labelsize=6, length=2)
    for side in axes.spines.values():
        side.set_color("#cccccc")
    found = [
        (_legend(target["legendFormat"], series), series)
        for target in panel["targets"]
        for series in answers[target["expr"]]
    ]
    if not any(math.isfinite(value) for _, series in found for value in series.values):
        axes.text(0.5, 0.5, "No data", ha="center", va="center", transform=axes.transAxes, color="#999999")
        axes.set_axis_off()
        return
    match panel["type"]:
        case "stat":
            _stat(axes, panel, found[0][1])
        case "table":
            _table(axes, found)
        case "heatmap":
            _heatmap(axes, [series for _, series in found])
        case _:
            _lines(axes, panel, sorted(found, key=lambda each: (-_sum(each[1]), each[0])))


def _legend(template: str, series: Series) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda label: series.labels.get(label[1], ""), template)


def _sum(series: Series) -> float:
    return sum(value for value in series.values if math.isfinite(value))


def _unit(panel: Mapping[str, Any]) -> str:
    unit: str = panel["fieldConfig"]["defaults"]["unit"]
    return unit


def figure_of(value: float, unit: str) -> str:
    """Return a value in a unit of Grafana's, without its suffix."""
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "s":
        return _duration(value)
    for least, prefix in _STEPS:
        if abs(value) >= least:
            return f"{value / least:.3g}{prefix}"
    return f"{value:.3g}"


def _suffix(unit: str) -> str:
    return {"none": "", "s": "", "percentunit": "", "reqps": " req/s", "bytes": "B"}.get(
        unit, unit.removeprefix("suffix:")
    )


def _duration(seconds: float) -> str:
    for length, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if abs(seconds) >= length:
            return f"{seconds / length:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


def _color(panel: Mapping[str, Any], value: float) -> str:
    """Return the colour of the highest threshold that a value reaches."""
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    reached = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return _THRESHOLDS[reached[-1]]


def _stat(axes: Axes, panel: Mapping[str, Any], series: Series) -> None:
    last = [value for value in series.values if math.isfinite(value)][-1]
    color = _color(panel, last)
    axes.fill_between(series.times_s, series.values, color=to_rgba(color, 0.15), linewidth=0)
    axes.set_ylim(bottom=0)
    text = figure_of(last, _unit(panel)) + _suffix(_unit(panel))
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, fontsize=15, color=color)
    axes.set_axis_off()


def _table(axes: Axes, found: Sequence[tuple[str, Series]]) -> None:
    names = sorted({name for _, series in found for name in series.labels})
    cells = [
        [*(series.labels.get(name, "") for name in names), f"{series.values[-1]:g}"] for _, series in found
    ]
    axes.set_axis_off()
    axes.table(cellText=cells, colLabels=[*names, "value"], loc="upper center", cellLoc="left").set_fontsize(
        7
    )


def _heatmap(axes: Axes, buckets: Sequence[Series]) -> None:
    """Draw the increase of each bucket; the series are cumulative over `le`."""
    ordered = sorted(buckets, key=lambda series: float(series.labels["le"]))
    rows = [[value if math.isfinite(value) else 0.0 for value in series.values] for series in ordered]
    steps = [
        [max(0.0, upper - lower) for upper, lower in zip(row, below, strict=True)]
        for row, below in zip(rows, [[0.0] * len(rows[0]), *rows], strict=False)
    ]
    axes.pcolormesh(steps, cmap="Blues")
    labels = ["∞" if (le := float(each.labels["le"])) == math.inf else _duration(le) for each in ordered]
    axes.set_yticks([index + 0.5 for index in range(len(labels))][::2], labels[::2])
    start = ordered[0].times_s[0]
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: _minutes(ordered[0].times_s[min(int(x), len(rows[0]) - 1)] - start))
    )
    axes.xaxis.set_major_locator(MaxNLocator(4))


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _at(times_s: Sequence[float], series: Series) -> list[float]:
    """Return the values at these times; 0 in gaps and before the series began."""
    values = dict(zip(series.times_s, series.values, strict=True))
    return [value if math.isfinite(value := values.get(time, 0.0)) else 0.0 for time in times_s]


def _lines(axes: Axes, panel: Mapping[str, Any], found: Sequence[tuple[str, Series]]) -> None:
    unit = _unit(panel)
    start = min(series.times_s[0] for _, series in found)
    custom = panel["fieldConfig"]["defaults"]["custom"]
    if custom["stacking"]["mode"] == "normal":
        times = sorted({time for _, series in found for time in series.times_s})
        stacks = [_at(times, series) for _, series in found]
        since = [time - start for time in times]
        axes.stackplot(since, *stacks, labels=[name for name, _ in found], alpha=0.6, linewidth=0.5)
    else:
        for name, series in found:
            axes.plot([time - start for time in series.times_s], series.values, label=name, linewidth=1)
    bounds = panel["fieldConfig"]["defaults"]
    # A little room, so that lines at the bounds are seen.
    highest = bounds.get("max") or axes.get_ylim()[1]
    axes.set_ylim(-0.03 * highest, 1.05 * highest)
    if highest < _LEAST:
        axes.set_ylim(-0.03, 1)
    _limits(axes, bounds["thresholds"]["steps"], custom["thresholdsStyle"]["mode"])
    states = bounds.get("mappings") or []
    names = {float(value): each["text"] for mapping in states for value, each in mapping["options"].items()}
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    if names:
        axes.set_yticks(list(names), list(names.values()))
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: figure_of(value, unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _minutes(value)))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(color="#eeeeee", linewidth=0.5)
    handles, texts = axes.get_legend_handles_labels()
    # Narrow panels have room for two names in a line.
    columns = 2 if panel["gridPos"]["w"] < 8 else 3
    axes.legend(
        handles[: 2 * columns],
        texts[: 2 * columns],
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.13),
        fontsize=6,
        ncols=columns,
        frameon=False,
    )


def _limits(axes: Axes, steps: Sequence[Mapping[str, Any]], mode: str) -> None:
    """Draw the limits that lie within the axis, as Grafana does."""
    if mode == "off":
        return
    top = axes.get_ylim()[1]
    # The line of a limit separates the colours on its two sides; the worse one names it.
    for below, step in pairwise(steps):
        worse = max(below["color"], step["color"], key=list(_THRESHOLDS).index)
        if step["value"] <= top:
            axes.axhline(step["value"], color=_THRESHOLDS[worse], linestyle="--", linewidth=0.8)

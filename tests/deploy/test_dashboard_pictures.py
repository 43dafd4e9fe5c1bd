"""Pictures of dashboards: every kind of panel is drawn, and figures read as Grafana writes them."""

from __future__ import annotations

import io
import json

import pytest
from PIL import Image, ImageChops

from scripts.monitoring.grafana import Dashboard, Panel, Query, Row, as_json
from scripts.monitoring.pictures import Answers, Series, draw, figure_of

KINDS = {"timeseries": "lines", "stat": "figure", "table": "builds", "heatmap": "buckets"}
TIMES = [float(second) for second in range(60)]


def dashboard() -> Dashboard:
    panels = tuple(
        Panel(kind, "A panel.", (Query(expr, "{{name}}"),), "reqps", kind, limits=(10, 20))
        for kind, expr in KINDS.items()
    )
    stacked = Panel("stacked", "A panel.", (Query("lines", "{{name}}"),), "s", stacked=True)
    return Dashboard("one", "One", "Every kind.", (Row("Panels", (*panels, stacked)),))


def answers() -> Answers:
    rising = [second / 2 for second in TIMES]
    gaps = [float("nan") if 20 < second < 30 else 5.0 for second in TIMES]
    return {
        "lines": [Series({"name": "a"}, TIMES, rising), Series({"name": "b"}, TIMES[10:], gaps[10:])],
        "figure": [Series({}, TIMES, rising)],
        "builds": [Series({"version": "1"}, TIMES, [2.0] * 60)],
        "buckets": [Series({"le": le}, TIMES, rising) for le in ("0.1", "1.0", "+Inf")],
    }


def test_every_kind_of_panel_is_drawn() -> None:
    given = json.loads(as_json(dashboard()))
    drawn = Image.open(io.BytesIO(draw(given, answers()))).convert("RGB")
    empty = Image.open(io.BytesIO(draw(given, dict.fromkeys(KINDS.values(), ())))).convert("RGB")
    assert drawn.size == empty.size
    rows = given["panels"][-1]["gridPos"]["y"] + 10
    for panel in given["panels"][1:]:
        place = panel["gridPos"]
        wide, high = drawn.width / 24, drawn.height / rows
        box = (place["x"] * wide, (place["y"] + 2) * high)
        area = (*box, box[0] + place["w"] * wide, box[1] + place["h"] * high)
        part = tuple(round(edge) for edge in area)
        assert ImageChops.difference(drawn.crop(part), empty.crop(part)).getbbox(), panel["title"]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.5, "percentunit", "50%"),
        (0.0125, "s", "12.5 ms"),
        (0.0, "s", "0 s"),
        (172_800, "s", "2 d"),
        (1500, "suffix: tok/s", "1.5k"),
        (0.25, "none", "0.25"),
    ],
)
def test_figures_have_units(value: float, unit: str, text: str) -> None:
    assert figure_of(value, unit) == text

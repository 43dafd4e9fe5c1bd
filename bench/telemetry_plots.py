"""What a telemetry benchmark shows: its table and its plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from bench.telemetry_summary import MOST_LOST, PARTS, Row, finely
from galley.bench.stats import Interval


def table(rows: Sequence[Row]) -> Table:
    """One row an arm."""
    found = Table(title="Telemetry (median of the pairs' ratios, 95 % interval)")
    found.add_column("arm")
    parts = [f"{part} us" for part in PARTS]
    for name in ("tokens/s", "against off", "CPU us/token", "against off ", *parts, "bytes", "sink us"):
        found.add_column(name, justify="right")
    for row in rows:
        found.add_row(
            row.arm,
            f"{row.tokens_per_s:.1f}",
            _shown(row.speed),
            f"{row.cpu_us_per_token:.0f}",
            _shown(row.cpu),
            *(f"{round(row.added_us[part].median):+d}" if part in row.added_us else "" for part in PARTS),
            f"{row.exported_bytes_per_token:.0f}",
            f"{row.sink_us_per_token:.0f}",
        )
    found.caption = (
        "off-again against off, all others against the mean of both; by process: CPU that it takes more, "
        "a token; bytes: exported, a token; sink: the CPU of who receives them, in no other figure"
    )
    return found


def _shown(interval: Interval | None) -> str:
    return "" if interval is None else finely(interval).replace("[", r"\[")


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Both ratios with their bounds, and who takes the CPU that is taken more."""
    compared = [row for row in rows if row.speed is not None]
    figure = Figure(figsize=(14, 5), layout="constrained")
    FigureCanvasAgg(figure)
    speed, cpu, parts = figure.subplots(1, 3)
    _ratios(speed, compared, [row.speed for row in compared], "tokens/s", 1 - MOST_LOST)
    _ratios(cpu, compared, [row.cpu for row in compared], "CPU seconds a token", 1 + MOST_LOST)
    width = 0.8 / len(PARTS)
    for slot, part in enumerate(PARTS):
        at = [index + slot * width for index in range(len(compared))]
        parts.bar(at, [row.added_us[part].median for row in compared], width=width, label=part)
    parts.set_xticks(
        [index + 0.4 - width / 2 for index in range(len(compared))], _names(compared), fontsize=7
    )
    parts.axhline(0.0, color="grey", lw=0.8)
    parts.set(title="CPU taken more, by process", ylabel="us a token")
    parts.legend(fontsize=7)
    figure.savefig(path, format="png", dpi=100)


def _ratios(
    axes: Axes, rows: Sequence[Row], given: Sequence[Interval | None], title: str, bound: float
) -> None:
    for at, interval in enumerate(given):
        if interval is not None:
            errors = [[interval.median - interval.low], [interval.high - interval.median]]
            axes.errorbar([at], [interval.median], yerr=errors, fmt="o", ms=5, color=f"C{at}")
    axes.axhline(1.0, color="grey", lw=0.8)
    axes.axhline(bound, color="tab:red", lw=0.8, ls="--", label="bound at 100 %")
    axes.set_xticks(range(len(rows)), _names(rows), fontsize=7)
    axes.set(title=f"{title}, against no telemetry", ylabel="ratio")
    axes.legend(fontsize=7)


def _names(rows: Sequence[Row]) -> list[str]:
    return [row.arm.replace("-", "\n", 1) for row in rows]

"""Print the tables and draw the plot of `make bench-engine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from bench.engine.summary import BANDS, MS, StepRow, invariance_rows, roofline_ms
from galley.bench.summary import median_interval


def show(console: Console, rows: Sequence[StepRow], measured: Mapping[int, Mapping[str, Any]]) -> None:
    """Print every table that the measurements allow."""
    if rows:
        console.print(_step_table(rows))
    for threads, found in measured.items():
        if "invariance" in found:
            console.print(_invariance_table(threads, found))
        console.print(_part_table(threads, found))


def _step_table(rows: Sequence[StepRow]) -> Table:
    columns = (
        "threads",
        "context",
        "rows",
        "split",
        "ours ms",
        "CPU ms",
        "transformers ms",
        "its cache",
        "ratio",
        "of roofline",
    )
    table = Table(*columns, title="Step (medians; ratio of pairs with its 95 % interval)")
    for row in rows:
        table.add_row(
            str(row.threads),
            str(row.context),
            str(row.rows),
            row.split,
            f"{row.ours_ms:.1f}",
            f"{row.ours_cpu_ms:.1f}",
            f"{row.peer_ms:.1f}",
            row.peer_form,
            str(row.ratio).replace("[", r"\["),
            "" if row.of_roofline is None else f"{row.of_roofline:.0%}",
        )
    return table


def _invariance_table(threads: int, measured: Mapping[str, Any]) -> Table:
    columns = ("case", "step ms", "our attention ms", "torch's ms", "its form", "share of a step")
    table = Table(*columns, title=f"Attention over the context, {threads} thread(s)")
    for row in invariance_rows(measured):
        table.add_row(
            row.case,
            f"{row.step_ms:.1f}",
            f"{row.attention_ms:.2f}",
            f"{row.torch_ms:.2f}",
            row.torch_form,
            str(row.share).replace("[", r"\["),
        )
    return table


def _part_table(threads: int, measured: Mapping[str, Any]) -> Table:
    table = Table("part", "ms", title=f"Parts, {threads} thread(s)")
    floor = roofline_ms(measured)
    if floor is not None:
        gb = max(measured["bandwidth"].values()) / 1e9
        table.add_row(f"roofline: weights once at {gb:.1f} GB/s", f"{floor:.2f}")
    for context, seconds in measured.get("contexts", {}).items():
        table.add_row(f"step 16x1, context {context}", f"{median_interval(seconds).median * MS:.2f}")
    for part in ("small", "pools", "prefill", "sampling", "host"):
        for name, seconds in measured.get(part, {}).items():
            if isinstance(seconds, list):
                table.add_row(f"{part}: {name}", f"{median_interval(seconds).median * MS:.2f}")
    return table


# ------------------------------------------------------------------------------------------ plot --


def draw(path: Path, rows: Sequence[StepRow], measured: Mapping[int, Mapping[str, Any]]) -> None:
    """Plot the row-cost curve beside transformers and the roofline, the ratios, the cost of context."""
    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    curve, ratios, contexts = figure.subplots(1, 3)
    _draw_curve(curve, rows, measured)
    _draw_ratios(ratios, rows)
    _draw_contexts(contexts, measured)
    figure.savefig(path, format="png", dpi=110)


def _draw_curve(axes: Axes, rows: Sequence[StepRow], measured: Mapping[int, Mapping[str, Any]]) -> None:
    for threads, context in dict.fromkeys((row.threads, row.context) for row in rows):
        mine = sorted(
            (row for row in rows if (row.threads, row.context) == (threads, context)),
            key=lambda row: row.rows,
        )
        label = f"{threads}t, context {context}"
        at = [row.rows for row in mine]
        (line,) = axes.plot(
            at, [row.ours_ms for row in mine], marker="o", ms=3, lw=0.9, label=f"ours {label}"
        )
        peer_ms = [row.peer_ms for row in mine]
        axes.plot(at, peer_ms, ":", marker="x", ms=3, color=line.get_color(), label=f"transformers {label}")
    floors = [floor for floor in map(roofline_ms, measured.values()) if floor is not None]
    if floors:
        axes.axhline(min(floors), color="grey", lw=0.8, label="weights read once")
    axes.set(title="row-cost curve", xlabel="rows", ylabel="ms", xscale="log", yscale="log")
    axes.legend(fontsize=6)


def _draw_ratios(axes: Axes, rows: Sequence[StepRow]) -> None:
    for threads, context in dict.fromkeys((row.threads, row.context) for row in rows):
        mine = [row for row in rows if (row.threads, row.context) == (threads, context)]
        medians = [row.ratio.median for row in mine]
        errors = [
            [row.ratio.median - row.ratio.low for row in mine],
            [row.ratio.high - row.ratio.median for row in mine],
        ]
        axes.errorbar(
            [row.rows for row in mine], medians, yerr=errors, fmt="o", ms=3, label=f"{threads}t, {context}"
        )
    for band in BANDS:
        last = min(band.last, max((row.rows for row in rows), default=1))
        axes.hlines(band.bound, band.first, max(last, band.first), color="grey", lw=0.8)
    axes.set(title="against transformers; the goals in grey", xlabel="rows", ylabel="ratio", xscale="log")
    axes.legend(fontsize=6)


def _draw_contexts(axes: Axes, measured: Mapping[int, Mapping[str, Any]]) -> None:
    for threads, found in measured.items():
        points = found.get("contexts", {})
        medians = [median_interval(seconds).median * MS for seconds in points.values()]
        axes.plot([int(context) for context in points], medians, marker="o", ms=3, label=f"{threads}t")
    axes.set(title="step of 16x1 by context used", xlabel="tokens of context", ylabel="ms")
    axes.legend(fontsize=6)

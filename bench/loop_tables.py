"""What a closed loop shows: its table and its plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from bench.loop_summary import LoopRow


def table(rows: Sequence[LoopRow], baseline: str) -> Table:
    """One row an arm."""
    columns = (
        "streams",
        "temp.",
        "arm",
        "tokens/s",
        f"against {baseline}",
        "CPU ms/token",
        "first ms p50 / p99",
        "inter-token ms p50 / p99",
        "cut",
    )
    found = Table(*columns, title="Closed loop (median of pairs' ratios, 95 % interval)")
    for row in rows:
        found.add_row(
            str(row.streams),
            f"{row.temperature:g}",
            row.arm,
            f"{row.tokens_per_s:.1f}",
            "" if row.ratio is None else str(row.ratio).replace("[", r"\["),
            f"{row.cpu_ms_per_token:.1f}",
            " / ".join(f"{ms:.0f}" for ms in row.first_token_ms),
            " / ".join(f"{ms:.1f}" for ms in row.inter_token_ms),
            f"{row.share_cut:.0%}",
        )
    return found


def draw(path: Path, rows: Sequence[LoopRow], baseline: str) -> None:
    """Tokens per second, the ratio and the time between tokens, by streams."""
    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    speed, ratio, between = figure.subplots(1, 3)
    for arm, temperature in dict.fromkeys((row.arm, row.temperature) for row in rows):
        mine = [row for row in rows if (row.arm, row.temperature) == (arm, temperature)]
        at = [row.streams for row in mine]
        label, style = f"{arm} at {temperature:g}", "-" if temperature == 0 else "--"
        speed.plot(at, [row.tokens_per_s for row in mine], style, marker="o", ms=3, label=label)
        between.plot(at, [row.inter_token_ms[1] for row in mine], style, marker="o", ms=3, label=label)
        compared = [(row.streams, row.ratio) for row in mine if row.ratio is not None]
        medians = [given.median for _, given in compared]
        errors = [
            [given.median - given.low for _, given in compared],
            [given.high - given.median for _, given in compared],
        ]
        ratio.errorbar([n for n, _ in compared], medians, yerr=errors, fmt=f"o{style}", ms=3, label=label)
    ratio.axhline(1.0, color="grey", lw=0.8)
    speed.set(title="speed", xlabel="streams", ylabel="counted tokens/s", xscale="log")
    ratio.set(title=f"against {baseline}", xlabel="streams", ylabel="ratio", xscale="log")
    between.set(title="between tokens, p99", xlabel="streams", ylabel="ms", xscale="log")
    for axes in (speed, ratio, between):
        axes.legend(fontsize=6)
    figure.savefig(path, format="png", dpi=110)

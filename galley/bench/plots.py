"""Draw a measurement of speculation as one PNG of six panels. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from galley.common.printable import one_line

if TYPE_CHECKING:
    from galley.bench.answers import Rounds
    from galley.bench.report import Report
    from galley.bench.summary import Row


def draw(path: Path, report: Report) -> None:
    figure_of(report).savefig(path, format="png", dpi=110)


def figure_of(report: Report) -> Figure:
    rows = report.rows
    figure = Figure(figsize=(16, 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3).flat
    _by_streams(next(panels), rows, lambda row: row.tokens_per_s, "speed", "counted tokens/s")
    _gains(next(panels), report)
    _times(next(panels), rows)
    _acceptance(next(panels), report.acceptance)
    _waste(next(panels), report.acceptance)
    _predicted(next(panels), rows, report.predicted)
    return figure


def _gains(axes: Axes, report: Report) -> None:
    """Draw the figures of the verdict, with their intervals."""
    by_load = report.mean_gains()
    for arm in dict.fromkeys(gain.arm for gain in by_load):
        mine = [gain for gain in by_load if gain.arm == arm]
        ratios = [gain.ratio for gain in mine]
        below = [ratio.median - ratio.low for ratio in ratios]
        above = [ratio.high - ratio.median for ratio in ratios]
        axes.errorbar(
            [gain.streams for gain in mine],
            [ratio.median for ratio in ratios],
            yerr=(below, above),
            marker="o",
            ms=3,
            capsize=2,
            label=arm,
        )
    axes.axhline(1.0, color="grey", lw=0.8)
    title = f"against {report.baseline}, mean of workloads, 95 % interval"
    axes.set(title=title, xlabel="streams", ylabel="ratio of tokens/s")
    _stream_ticks(axes, report.rows)
    _legend(axes, 6)


def _median(row: Row) -> float:
    return row.ratio.median if row.ratio is not None else float("nan")


def _by_streams(
    axes: Axes, rows: Sequence[Row], value: Callable[[Row], float], title: str, ylabel: str
) -> None:
    for arm in _arms(rows):
        mine = [row for row in rows if row.arm == arm]
        at = sorted({row.streams for row in mine})
        groups = [[value(row) for row in mine if row.streams == streams] for streams in at]
        axes.plot(at, [sum(group) / len(group) for group in groups], marker="o", ms=3, label=arm)
    axes.set(title=f"{title}, mean of workloads", xlabel="streams", ylabel=ylabel)
    _stream_ticks(axes, rows)
    _legend(axes, 6)


def _times(axes: Axes, rows: Sequence[Row]) -> None:
    for colour, arm in enumerate(_arms(rows)):
        mine = [row for row in rows if row.arm == arm]
        at = sorted({row.streams for row in mine})
        between = [max(row.inter_token_ms[-1] for row in mine if row.streams == streams) for streams in at]
        first = [max(row.first_token_ms[-1] for row in mine if row.streams == streams) for streams in at]
        axes.plot(at, between, "-", color=f"C{colour}", marker="o", ms=3, label=f"{arm}: between tokens, p99")
        axes.plot(at, first, "--", color=f"C{colour}", marker="o", ms=3, label=f"{arm}: first token, p99")
    axes.set(title="times, worst workload", xlabel="streams", ylabel="ms", yscale="log")
    _stream_ticks(axes, rows)
    _legend(axes, 5)


def _stream_ticks(axes: Axes, rows: Sequence[Row]) -> None:
    at = sorted({row.streams for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [str(streams) for streams in at])
    axes.minorticks_off()


def _acceptance(axes: Axes, acceptance: Mapping[tuple[str, str], Rounds]) -> None:
    for (workload, arm), of in acceptance.items():
        at = range(1, len(of.by_position) + 1)
        axes.plot(at, of.by_position, marker=".", lw=0.9, label=f"{_named(workload)} {arm}")
    axes.set(
        title="accepted where verified", xlabel="position in the proposal", ylabel="share", ylim=(0, 1.02)
    )
    _legend(axes, 5)


def _named(workload: str) -> str:
    return one_line(workload).replace("$", r"\$")  # which would begin a formula


def _waste(axes: Axes, acceptance: Mapping[tuple[str, str], Rounds]) -> None:
    names = [f"{_named(workload)}\n{arm}" for workload, arm in acceptance]
    kinds = {
        "accepted": [of.accepted for of in acceptance.values()],
        "verified in vain": [of.wasted_verify for of in acceptance.values()],
        "not verified": [max(0, of.proposed - of.verified) for of in acceptance.values()],
    }
    bottom = [0] * len(names)
    for label, values in kinds.items():
        axes.bar(range(len(names)), values, bottom=bottom, label=label)
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=5)
    axes.set(title="what became of proposed tokens", ylabel="tokens")
    _legend(axes, 6)


def _predicted(axes: Axes, rows: Sequence[Row], predicted: Mapping[Row, tuple[float, int | None]]) -> None:
    for arm in _arms(rows):
        mine = [row for row in rows if row.arm == arm and row in predicted and row.ratio is not None]
        if mine:
            axes.plot(
                [predicted[row][0] for row in mine], [_median(row) for row in mine], "o", ms=4, label=arm
            )
    axes.axline((1.0, 1.0), slope=1, color="grey", lw=0.8)
    axes.set(title="speed-up", xlabel="predicted by the cost model", ylabel="measured")
    _legend(axes, 6)


def _legend(axes: Axes, size: int) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=size)


def _arms(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.arm for row in rows))

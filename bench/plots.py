"""The plots of a round benchmark: speed, ratio, acceptance by position, orchestration cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.summary import ALL_SETS, Acceptance, Speed


def draw(
    path: Path,
    speeds: Sequence[Speed],
    acceptances: Sequence[Acceptance],
    orchestration_ms: Mapping[str, Sequence[float]],
) -> None:
    """Draw all four panels into a PNG; `orchestration_ms` has every round's cost, by arm."""
    figure = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2).flat
    _draw_speeds(next(panels), speeds)
    _draw_ratios(next(panels), speeds)
    _draw_acceptance(next(panels), acceptances)
    _draw_orchestration(next(panels), orchestration_ms)
    figure.savefig(path, format="png", dpi=110)


def _draw_speeds(axes: Axes, rows: Sequence[Speed]) -> None:
    groups = _groups(rows)
    for slot, arm in enumerate(_arms(rows)):
        of_arm = {_label(row): row.tokens_per_s for row in rows if row.arm == arm}
        width = 0.8 / len(_arms(rows))
        axes.bar(
            [at + slot * width for at in range(len(groups))],
            [of_arm.get(group, 0.0) for group in groups],
            width=width,
            label=arm,
        )
    axes.set_xticks([at + 0.35 for at in range(len(groups))], groups, rotation=45, ha="right", fontsize=7)
    axes.set(title="speed", ylabel="tokens/s, first token's time included")
    axes.legend(fontsize=7)


def _draw_ratios(axes: Axes, rows: Sequence[Speed]) -> None:
    groups = _groups(rows)
    for slot, arm in enumerate(_arms(rows)):
        mine = [row for row in rows if row.arm == arm]
        medians = [row.ratio.median for row in mine]
        axes.errorbar(
            [groups.index(_label(row)) + slot * 0.1 for row in mine],
            medians,
            yerr=[
                [row.ratio.median - row.ratio.low for row in mine],
                [row.ratio.high - row.ratio.median for row in mine],
            ],
            fmt="o",
            markersize=4,
            label=arm,
        )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups, rotation=45, ha="right", fontsize=7)
    axes.set(title="against k=0: median of pairs, 95 % interval", ylabel="ratio of tokens/s")


def _draw_acceptance(axes: Axes, rows: Sequence[Acceptance]) -> None:
    for row in rows:
        if row.prompt_set != ALL_SETS:
            style = "-" if row.temperature == 0 else "--"
            label = f"{row.arm} {row.prompt_set} {row.temperature:g}"
            axes.plot(
                range(1, len(row.by_position) + 1), row.by_position, style, marker=".", lw=0.9, label=label
            )
    axes.set(
        title="accepted where verified", xlabel="position in the proposal", ylabel="share", ylim=(0, 1.02)
    )
    axes.legend(fontsize=5, ncols=3)


def _draw_orchestration(axes: Axes, by_arm: Mapping[str, Sequence[float]]) -> None:
    for arm, values in by_arm.items():
        ordered = sorted(values)
        axes.plot(ordered, [(at + 1) / len(ordered) for at in range(len(ordered))], label=arm)
    axes.set_xscale("log")
    axes.set(
        title="orchestration per round",
        xlabel="ms: round minus draft and target compute",
        ylabel="share below",
    )
    axes.legend(fontsize=7)


def _arms(rows: Sequence[Speed]) -> list[str]:
    return list(dict.fromkeys(row.arm for row in rows))


def _groups(rows: Sequence[Speed]) -> list[str]:
    return list(dict.fromkeys(_label(row) for row in rows))


def _label(row: Speed) -> str:
    return f"{row.prompt_set} {row.temperature:g}"

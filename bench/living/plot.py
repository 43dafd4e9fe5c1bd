"""Draw what the demonstration showed: drafted tokens and speed over time, and the changes of versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.living.traffic import Figures
from bench.living.workloads import WORKLOADS
from galley.core.versions.state import VersionEvent

_COLOURS = {"try": "tab:blue", "promote": "tab:green", "roll_back": "tab:red", "drain": "tab:grey"}


def draw(
    path: Path,
    windows: Sequence[tuple[float, Mapping[str, Figures]]],
    changes: Sequence[tuple[float, VersionEvent]],
) -> None:
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    shares, speeds = figure.subplots(2, 1, sharex=True)
    at_min = [at_s / 60 for at_s, _ in windows]
    for name in WORKLOADS:
        shares.plot(at_min, [of[name].drafted_share for _, of in windows], marker="o", ms=3, label=name)
        speeds.plot(at_min, [of[name].tokens_per_s for _, of in windows], marker="o", ms=3, label=name)
    shares.set(ylabel="accepted draft tokens / output tokens", ylim=(0, 1))
    speeds.set(ylabel="tokens/s of the stream", xlabel="minutes", ylim=(0, None))
    for axes in (shares, speeds):
        for at_s, event in changes:
            axes.axvline(at_s / 60, color=_COLOURS[event.kind], lw=1, ls="--")
        axes.legend(fontsize=8)
    names = ", ".join(f"{colour.removeprefix('tab:')}: {kind}" for kind, colour in _COLOURS.items())
    figure.suptitle(f"Drafts that learn from the traffic ({names})", fontsize=10)
    figure.savefig(path, format="png", dpi=100)

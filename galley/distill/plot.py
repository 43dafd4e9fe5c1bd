"""Plot acceptance over tokens seen; matplotlib comes with the extra `all`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from galley.distill.training.evaluation import Acceptance

_MEASURES = {"greedy": "greedy: share of draft tokens accepted", "sampled": "sampled with the same noise"}


def draw(path: Path, curve: Sequence[dict[str, Any]], against: dict[str, Acceptance] | None) -> None:
    """Draw one line a workload into a PNG; the present draft is dashed. Raises ImportError, OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    seen = [point["seen"] / 1e6 for point in curve]
    for axes, (measure, title) in zip(figure.subplots(1, 2), _MEASURES.items(), strict=True):
        for name in curve[-1]["acceptance"]:
            shares = [point["acceptance"][name][measure] for point in curve]
            (line,) = axes.plot(seen, shares, marker="o", markersize=3, label=name)
            if against is not None and name in against:
                axes.axhline(getattr(against[name], measure), color=line.get_color(), linestyle="--")
        axes.set(title=title, xlabel="million answer tokens seen", ylim=(0, 1))
    axes.legend(fontsize=7)
    figure.savefig(path, format="png", dpi=110)

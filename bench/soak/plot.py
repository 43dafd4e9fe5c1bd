"""The plot of a soak: memory and tokens a second over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.soak.memory import REDIS_MEMORY, Sample
from bench.soak.outcome import Span


def draw(path: Path, samples: Sequence[Sample], spans: dict[str, Span], rates: Sequence[float]) -> None:
    """Plot each process, Redis, blocks, keys, and `rates`: tokens/s around each sample."""
    figure = Figure(figsize=(13, 12), layout="constrained")
    FigureCanvasAgg(figure)
    begin_s = samples[0].at_s
    at_min = [(sample.at_s - begin_s) / 60 for sample in samples]
    names = [*samples[0].processes, REDIS_MEMORY]
    series = {f"{name}, MiB": [sample.megabytes(name) for sample in samples] for name in names}
    series["free blocks of the target"] = [float(sample.blocks_free) for sample in samples]
    series["tokens/s"] = list(rates)
    series["keys of sessions"] = [float(sample.session_keys) for sample in samples]
    panels = figure.subplots(-(-len(series) // 2), 2, sharex=True).flat
    for axes, (name, values) in zip(panels, series.items(), strict=False):
        axes.plot(at_min, values, lw=0.9)
        axes.set_ylim(bottom=0)
        axes.set_title(name, fontsize=9)
        for span in spans.values():
            axes.axvspan(
                (span.first_s - begin_s) / 60, (span.last_s - begin_s) / 60, color="tab:orange", alpha=0.12
            )
    figure.suptitle(f"minutes; shaded: {', '.join(spans)}")
    figure.savefig(path, format="png", dpi=100)

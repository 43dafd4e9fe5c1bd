"""The table, the goals and the plot of the gateway benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.table import Table

from bench.gateway.load import Measured
from bench.gateway.run import (
    GATEWAYS,
    ONE,
    OVERLOAD,
    OVERLOAD_SLOTS,
    PACED,
    SATURATED,
    SIX,
    TELEMETRY,
    Cell,
    cells_of,
    overload_arm,
)
from bench.harness import Goal, at_least, at_most
from galley.bench.summary import Interval, median_interval, ratio_interval

MOST_US, MOST_SATURATED_US, MOST_FLAT, MOST_SHARED = 130.0, 60.0, 1.15, 1.1
MOST_FIRST_MS, MOST_REFUSAL_MS, MOST_GAPS = 1000.0, 100.0, 3.0
_P50, _P99 = 0, 2
_BUSY_STREAMS = 100


def row_of(cell: Cell) -> tuple[str, ...]:
    """Return a row of the table."""
    measured = cell.measured
    return (
        cell.part,
        cell.verdict,
        _streams(cell),
        cell.arm,
        f"{measured.us_per_token:.0f}",
        f"{measured.store_us_per_token:.0f}",
        f"{measured.tokens_per_s:.0f}",
        f"{measured.cpu_s / measured.seconds:.2f}",
        f"{measured.tokens_per_message:.2f}",
        _times(measured.first_token_ms),
        _times(measured.gap_ms),
        f"{measured.refused}/{measured.began}",
        "; ".join(measured.failed),
    )


def _streams(cell: Cell) -> str:
    if not cell.streams:
        return "arriving"
    started = cell.measured.started
    return str(cell.streams) if started >= cell.streams else f"{started} of {cell.streams}"


COLUMNS = (
    "part",
    "verdicts",
    "streams",
    "arm",
    "CPU us/token",
    "store us/token",
    "tokens/s",
    "cores",
    "tokens/message",
    "first token ms p50/90/99",
    "gap ms p50/90/99",
    "refused",
    "failed",
)


def table_of(cells: Sequence[Cell]) -> Table:
    """Return all cells as a table."""
    table = Table(*COLUMNS)
    for cell in cells:
        table.add_row(*row_of(cell))
    return table


def _times(ms: Sequence[float]) -> str:
    return "/".join(f"{value:.0f}" for value in ms)


def us_of(blocks: Sequence[Measured]) -> Interval:
    """Return the median CPU µs of a token over blocks."""
    return median_interval([block.us_per_token for block in blocks])


def goals(cells: Sequence[Cell]) -> list[Goal]:
    """Judge the parts that were run."""
    return [*_paced(cells), *_saturated(cells), *_overload(cells), *_gateways(cells)]


def _paced(cells: Sequence[Cell]) -> Iterator[Goal]:
    blocks = cells_of(cells, PACED)
    for streams, of in blocks.items():
        yield at_most("cpu", f"CPU a token, {streams} streams, {ONE}", us_of(of), MOST_US, " us")
    if len(blocks) > 1:
        least, most = (of[streams] for of in [blocks] for streams in (min(blocks), max(blocks)))
        what = f"CPU a token, {max(blocks)} streams over {min(blocks)}"
        ratio = ratio_interval([one.us_per_token for one in most], [one.us_per_token for one in least])
        yield at_most("flat", what, ratio, MOST_FLAT, "x")


def _saturated(cells: Sequence[Cell]) -> Iterator[Goal]:
    for streams, of in cells_of(cells, SATURATED).items():
        if streams >= _BUSY_STREAMS:
            what = f"CPU a token at saturation, {streams} streams, {ONE}"
            yield at_most("saturated", what, us_of(of), MOST_SATURATED_US, " us")


def _overload(cells: Sequence[Cell]) -> Iterator[Goal]:
    for slots in OVERLOAD_SLOTS:
        for [block] in cells_of(cells, OVERLOAD, arm=overload_arm(slots)).values():
            where = f"at 1.5 times what a gateway carries, {slots} slots"
            if block.first_token_ms:
                first = _exact(block.first_token_ms[_P99])
                yield at_most("ttft", f"p99 of first tokens {where}", first, MOST_FIRST_MS, " ms")
            if block.gap_ms:
                spread = _exact(block.gap_ms[_P99] / block.gap_ms[_P50])
                yield at_most("gaps", f"p99 over median of gaps {where}", spread, MOST_GAPS, "x")
            if block.refused:
                took = _exact(block.refusal_ms[_P99])
                yield at_most("refusals", f"p99 of refusals {where}", took, MOST_REFUSAL_MS, " ms")
                hinted = _exact(block.hinted / block.refused)
                yield at_least("hints", f"refusals that say when to retry {where}", hinted, 1.0)


def _gateways(cells: Sequence[Cell]) -> Iterator[Goal]:
    arms = list(dict.fromkeys(cell.arm for cell in cells if cell.part == GATEWAYS))
    blocks = {arm: next(iter(cells_of(cells, GATEWAYS, arm=arm).values())) for arm in arms}
    alone = [block.us_per_token for block in blocks.pop("1", [])]
    for arm, of in blocks.items():
        ratio = ratio_interval([block.us_per_token for block in of], alone)
        yield at_most("linear", f"CPU a token, {arm} gateways over one", ratio, MOST_SHARED, "x")


def _exact(value: float) -> Interval:
    return Interval(value, value, value, 1)


def telemetry_ratio(cells: Sequence[Cell]) -> Interval | None:
    """Return the CPU of a token with all telemetry over that without; None if it was not measured."""
    plain, traced = (
        [block.us_per_token for of in cells_of(cells, TELEMETRY, arm=arm).values() for block in of]
        for arm in ("plain", "traced")
    )
    return ratio_interval(traced, plain) if plain and traced else None


def summary(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return the means of each cell's blocks, for the record."""
    groups: dict[tuple[str, str, int, str], list[Measured]] = {}
    for cell in cells:
        groups.setdefault((cell.part, cell.verdict, cell.streams, cell.arm), []).append(cell.measured)
    return [
        {
            "part": part,
            "verdict": verdict,
            "streams": streams,
            "arm": arm,
            "started": blocks[-1].started,
            "blocks": len(blocks),
            "us_per_token": [round(block.us_per_token, 1) for block in blocks],
            "store_us_per_token": [round(block.store_us_per_token, 1) for block in blocks],
            "tokens_per_s": round(fmean(block.tokens_per_s for block in blocks)),
            "cores": round(fmean(block.cpu_s / block.seconds for block in blocks), 3),
            "tokens_per_message": round(fmean(block.tokens_per_message for block in blocks), 2),
            "first_token_ms": blocks[-1].first_token_ms,
            "gap_ms": blocks[-1].gap_ms,
            "began": sum(block.began for block in blocks),
            "refused": sum(block.refused for block in blocks),
            "hinted": sum(block.hinted for block in blocks),
            "refusal_ms": blocks[-1].refusal_ms,
            "failed": [what for block in blocks for what in block.failed],
        }
        for (part, verdict, streams, arm), blocks in groups.items()
    ]


def draw(path: Path, cells: Sequence[Cell]) -> None:
    """Plot the CPU of a token over the number of streams."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # slow to load
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for part in (PACED, SATURATED):
        for verdict in (ONE, SIX):
            if blocks := cells_of(cells, part, verdict):
                medians = [median(block.us_per_token for block in of) for of in blocks.values()]
                axes.plot(list(blocks), medians, marker="o", label=f"{part}, {verdict}")
    axes.set(xlabel="streams", ylabel="gateway CPU a token, µs", xscale="log", ylim=(0, None))
    axes.axhline(MOST_US, color="grey", linewidth=0.8)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)

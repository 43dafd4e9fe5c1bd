"""`galley plan`: compute what speculation costs and gains."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from pathlib import Path  # Typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from galley.cli.errors import check_plot, usage_of
from galley.core.cost.model import (
    Plan,
    RowCostCurve,
    best_k,
    break_even_alpha,
    expected_confirmed,
    gain,
    round_cost,
)
from galley.core.cost.model import plan as plan_of
from galley.core.errors import InvalidField
from galley.plan.capacity_file import plan_capacity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TIMES = "\N{MULTIPLICATION SIGN}"
_ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
_BAR = "\N{FULL BLOCK}"
_BAR_CELLS = 24
_TEXTBOOK_CONFIRMED = 3.0
_MAX_K = 16


@dataclass(frozen=True, slots=True)
class _Case:
    tokens: int
    k: int
    confirmed_per_round: float
    draft_cost_ratio: float


@dataclass(frozen=True, slots=True)
class _Row:
    k: int
    expected_confirmed: float
    cost: float
    gain: float


@dataclass(frozen=True)
class _Peak:
    """The table over k, its peak, and the acceptance rate from which speculation pays (None: never)."""

    alpha: float
    draft_cost_ratio: float
    curve: RowCostCurve
    max_k: int
    sessions: int

    def gain(self, k: int, alpha: float) -> float:
        return gain(alpha, k, self.draft_cost_ratio, self.curve, self.sessions)

    @cached_property
    def rows(self) -> tuple[_Row, ...]:
        return tuple(
            _Row(
                k,
                expected_confirmed(self.alpha, k),
                round_cost(k, self.draft_cost_ratio, self.curve, self.sessions),
                self.gain(k, self.alpha),
            )
            for k in range(self.max_k + 1)
        )

    @cached_property
    def best_k(self) -> int:
        return best_k(self.alpha, self.draft_cost_ratio, self.curve, self.sessions, self.max_k)

    @cached_property
    def break_even_alpha(self) -> float | None:
        return break_even_alpha(self.draft_cost_ratio, self.curve, self.max_k, self.sessions)


def plan(  # noqa: PLR0913  # a command's options
    *,
    tokens: Annotated[int, typer.Option(help="Number of output tokens.")] = 12,
    k: Annotated[int, typer.Option(help="Draft tokens a round.")] = 4,
    confirmed_per_round: Annotated[
        float | None,
        typer.Option(
            help="Tokens that a round confirms: accepted draft tokens and the target's own. "
            "Default: 3, or with --alpha what is expected at k."
        ),
    ] = None,
    draft_cost_ratio: Annotated[
        float, typer.Option(help="Number of draft steps that cost one target step. inf: drafts are free.")
    ] = 6.0,
    alpha: Annotated[
        float | None,
        typer.Option(
            help="Acceptance rate: probability that a draft token is accepted if all before it were. "
            "Adds the gain by k, its peak, and the rate from which speculation pays. Default: none."
        ),
    ] = None,
    row_costs: Annotated[
        str | None,
        typer.Option(
            help="With --alpha: cost of a target step by its number of rows, relative to one row, "
            "as rows:cost,... Default: 1:1."
        ),
    ] = None,
    max_k: Annotated[
        int | None, typer.Option(help="With --alpha: largest k to consider. Default: 16.")
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(help="With --alpha: number of sessions that share a step. Default: 1.")
    ] = None,
    capacity: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of a load (docs/operate/scaling.md). Print the targets, drafts and gateways "
            "that it needs instead."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="With --alpha: PNG file to draw the gain into.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Compute what speculation costs and gains, without running anything.

    Rounds = tokens / confirmed per round, rounded up; each is one target step. Draft steps = rounds x k. Cost
    in target steps = rounds + draft steps / ratio. --alpha adds the k of the highest gain.
    """
    if capacity is not None:
        plan_capacity(capacity, as_json=as_json)
        return
    flags = {"--row-costs": row_costs, "--max-k": max_k, "--sessions": sessions, "--plot": plot}
    _check_flags(alpha, flags, plot)
    try:
        if confirmed_per_round is None:
            confirmed_per_round = _TEXTBOOK_CONFIRMED if alpha is None else expected_confirmed(alpha, k)
        case = _Case(tokens, k, confirmed_per_round, draft_cost_ratio)
        textbook = plan_of(*astuple(case))
        facts, peak = asdict(case) | asdict(textbook), None
        if alpha is not None:
            curve = RowCostCurve.parse(row_costs or "1:1")
            largest_k = _MAX_K if max_k is None else max_k
            peak = _Peak(alpha, draft_cost_ratio, curve, largest_k, 1 if sessions is None else sessions)
            facts |= _peak_as_dict(peak)
    except InvalidField as fault:
        option = "--" + fault.field.replace("_", "-")
        raise typer.BadParameter(fault.problem, param_hint=option) from fault
    if plot is not None and peak is not None:
        _draw(peak, plot)
    if as_json:
        # JSON has no infinity: a free draft is null.
        ratio = None if math.isinf(draft_cost_ratio) else draft_cost_ratio
        typer.echo(json.dumps(facts | {"draft_cost_ratio": ratio}))
        return
    _print_textbook(case, textbook)
    if peak is not None:
        _print_peak(peak)
        typer.echo(_difference(case, textbook))
    if plot is not None:
        typer.echo(f"Plot: {plot}")


def _check_flags(alpha: float | None, flags: Mapping[str, object], plot: Path | None) -> None:
    for flag, value in flags.items():
        if alpha is None and value is not None:
            raise typer.BadParameter("needs --alpha", param_hint=flag)
    if plot is not None:
        check_plot(plot)


def _peak_as_dict(peak: _Peak) -> dict[str, Any]:
    by_k = [asdict(row) for row in peak.rows]
    return {
        "alpha": peak.alpha,
        "row_costs": peak.curve.points,
        "sessions": peak.sessions,
        "best_k": peak.best_k,
        "best_gain": peak.rows[peak.best_k].gain,
        "break_even_alpha": peak.break_even_alpha,
        "by_k": by_k,
    }


def _print_textbook(case: _Case, textbook: Plan) -> None:
    ratio = f"{case.draft_cost_ratio:g} draft steps to a target step"
    if math.isinf(case.draft_cost_ratio):
        ratio = "drafts for free"
    # "0.7x fewer" would read as a gain.
    gained = f"{textbook.gain:.1f}{_TIMES} fewer"
    if textbook.gain < 1:
        gained = f"{1 / textbook.gain:.1f}{_TIMES} more"
    typer.echo(
        f"{case.tokens} tokens, k={case.k}, {case.confirmed_per_round:.4g} confirmed per round, {ratio}:\n"
        f"  {textbook.passes} target passes\n"
        f"  {textbook.draft_steps} draft steps\n"
        f"  {textbook.cost:.1f} target-step equivalents\n"
        f"  {gained} than {case.tokens}"
    )


def _difference(case: _Case, textbook: Plan) -> str:
    rounds = case.tokens / case.confirmed_per_round
    return (
        f"The figure above the table is for {case.tokens} tokens: {rounds:.2f} rounds, rounded up to "
        f"{textbook.passes}, each at the cost of one row.\n"
        "The table is the mean of a long output, at the cost of its rows."
    )


def _print_peak(peak: _Peak) -> None:
    sharing = "" if peak.sessions == 1 else f", {peak.sessions} sessions a pass"
    table = Table(title=f"Gain by k at {_ALPHA}={peak.alpha:g}{sharing}", title_justify="left")
    for name in ("k", "confirmed", "cost", "gain"):
        table.add_column(name, justify="right")
    table.add_column("")
    highest = max(row.gain for row in peak.rows)
    for row in peak.rows:
        cells = max(1, round(row.gain / highest * _BAR_CELLS))
        marked = row.k == peak.best_k
        table.add_row(
            str(row.k),
            f"{row.expected_confirmed:.2f}",
            f"{row.cost:.2f}",
            f"{row.gain:.2f}{_TIMES}",
            _BAR * cells + (" peak" if marked else ""),
            style="bold" if marked else None,
        )
    Console().print(table)
    best = peak.rows[peak.best_k]
    if best.k:
        typer.echo(f"The gain peaks at k={best.k}: {best.gain:.2f}{_TIMES} plain decoding.")
    else:
        typer.echo("Nothing pays: plain decoding (k=0) is best.")
    if peak.break_even_alpha is None:
        typer.echo(f"Speculation never pays here, not even at {_ALPHA}=1.")
    else:
        typer.echo(f"Speculation pays at all from {_ALPHA}={peak.break_even_alpha:.3f} on.")


def _draw(peak: _Peak, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # an extra, slow to load
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    by_k, by_alpha = figure.subplots(1, 2)
    _draw_by_k(by_k, peak)
    _draw_by_alpha(by_alpha, peak)
    with usage_of("--plot"):
        figure.savefig(path, format="png", dpi=120)


def _draw_by_k(axes: Axes, peak: _Peak) -> None:
    colours = ["tab:orange" if row.k == peak.best_k else "tab:blue" for row in peak.rows]
    axes.bar([row.k for row in peak.rows], [row.gain for row in peak.rows], color=colours)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(
        title=f"alpha={peak.alpha:g}: peak at k={peak.best_k}",
        xlabel="k (draft tokens a round)",
        ylabel="gain over plain decoding",
    )


def _draw_by_alpha(axes: Axes, peak: _Peak) -> None:
    alphas = [step / 100 for step in range(101)]
    best = [max(peak.gain(k, alpha) for k in range(peak.max_k + 1)) for alpha in alphas]
    axes.plot(alphas, best)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.axvline(peak.alpha, color="tab:orange", linewidth=0.8)
    title = "never pays"
    if peak.break_even_alpha is not None:
        axes.axvline(peak.break_even_alpha, color="tab:green", linestyle="--", linewidth=0.8)
        title = f"pays from alpha={peak.break_even_alpha:.3f} on"
    axes.set(title=title, xlabel="alpha (acceptance rate)", ylabel="gain at the best k")

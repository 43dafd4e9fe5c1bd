"""`galley plan`: compute what speculation costs and gains, or what the load in a TOML file needs."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from pathlib import Path  # Typer reads the annotation
from typing import Annotated, Any, TypeVar, cast

import typer
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from galley.cli.flags import check_plot, refuse_typed, usage_of
from galley.common.constraints import constraint_of
from galley.common.printable import one_line
from galley.core.cost.model import (
    MAX_K,
    Plan,
    RowCostCurve,
    best_k,
    break_even_alpha,
    expected_confirmed,
    gain,
    round_cost,
)
from galley.core.cost.model import plan as plan_of
from galley.core.errors import InvalidField, check_range
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.plan.capacity import (
    NO_DRAFT,
    Capacity,
    DraftSize,
    KvMemory,
    Load,
    Spares,
    TargetSize,
    Tiers,
    load_of_streams,
)
from galley.plan.capacity import capacity as capacity_of
from galley.plan.measured import Measured, read_measured, read_target_log

T = TypeVar("T")

_TIMES = "\N{MULTIPLICATION SIGN}"
_ALPHA = "\N{GREEK SMALL LETTER ALPHA}"
_BAR = "\N{FULL BLOCK}"
_BAR_CELLS = 24
_TEXTBOOK_CONFIRMED = 3.0
_TEXTBOOK_RATIO = 6.0
_MAX_K = 16
_CAPACITY, _STREAMS, _TARGET_LOG = "--capacity", "--streams", "--target-log"
_OF_ONE_STREAM = (
    *("tokens", "k", "confirmed_per_round", "draft_cost_ratio"),
    *("alpha", "row_costs", "max_k", "sessions", "plot"),
)
_GIB = 2**30
# From so many on, tokens/s are shown in thousands.
_FEW_TOKENS = 10_000
_TABLES = ("load", "target", "draft", "spares", "tiers")
_GATEWAY_BOUNDS = {"sessions": "open sessions", "cpu": "CPU"}
_STRICT = ConfigDict(extra="forbid")


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
        float | None,
        typer.Option(
            help="Number of draft steps that cost one target step. inf: drafts are free. "
            "Default: 6, or measured with --from."
        ),
    ] = None,
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
    bench: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="JSON file of `galley bench --json`. Gives --alpha, --row-costs and --draft-cost-ratio, or "
            "with --capacity what its file leaves out. Default: none.",
            dir_okay=False,
        ),
    ] = None,
    workload: Annotated[
        str, typer.Option(help="With --from: the workload to plan for. Default: all of the measurement.")
    ] = "",
    capacity: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of a load (docs/operate/scaling.md). Print the targets, drafts and gateways "
            "that it needs instead."
        ),
    ] = None,
    target_log: Annotated[
        Path | None,
        typer.Option(
            help="With --capacity: log of a target of either engine, in JSON lines. Gives step_ms, "
            "row_costs, kv_tokens and block_tokens where its file leaves them out. Default: none.",
            dir_okay=False,
        ),
    ] = None,
    streams: Annotated[
        str,
        typer.Option(
            help="With --capacity: numbers of open streams, comma-separated. Print what each needs, whatever "
            "answers_per_s the file has. Default: none."
        ),
    ] = "",
    plot: Annotated[Path | None, typer.Option(help="With --alpha: PNG file to draw the gain into.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Compute what speculation costs and gains, without running anything.

    Rounds = tokens / confirmed per round, rounded up; each is one target step. Draft steps = rounds x k. Cost
    in target steps = rounds + draft steps / ratio. --alpha adds the k of the highest gain.
    """
    measured = _read_bench(bench, workload)
    if capacity is not None:
        refuse_typed(_OF_ONE_STREAM, "must not come with --capacity")
        steps = _read_steps(target_log)
        _plan_capacity(capacity, measured, steps, _stream_counts(streams), as_json=as_json)
        return
    _refuse_without_capacity({_STREAMS: streams, _TARGET_LOG: target_log})
    alpha, row_costs, draft_cost_ratio = _inputs(measured, alpha, row_costs, draft_cost_ratio)
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
            check_range("max_k", largest_k, least=1, most=MAX_K)
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
    _print_measured(measured, workload)
    _print_textbook(case, textbook)
    if peak is not None:
        _print_peak(peak)
        typer.echo(_difference(case, textbook))
    if plot is not None:
        typer.echo(f"Plot: {plot}")


def _stream_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        counts = [0]
    if any(count < 1 for count in counts):
        raise typer.BadParameter(
            f"must be whole numbers >= 1, comma-separated, got {text!r}", param_hint=_STREAMS
        )
    return counts


def _read_bench(path: Path | None, workload: str) -> Measured | None:
    if path is None:
        if workload:
            raise typer.BadParameter("needs --from", param_hint="--workload")
        return None
    with _refused("--from"):
        return read_measured(path, workload)


def _read_steps(path: Path | None) -> dict[str, Any]:
    with _refused(_TARGET_LOG):
        return {} if path is None else read_target_log(path)


@contextmanager
def _refused(flag: str) -> Iterator[None]:
    """Refuse the file of `flag` if it cannot be read or used."""
    with usage_of(flag):
        try:
            yield
        except OSError as error:
            raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None


def _inputs(
    measured: Measured | None, alpha: float | None, row_costs: str | None, ratio: float | None
) -> tuple[float | None, str | None, float]:
    """Return the flags, with the measured value or the default for one that is not given."""
    if measured is None:
        return alpha, row_costs, _TEXTBOOK_RATIO if ratio is None else ratio
    return (
        measured.alpha if alpha is None else alpha,
        row_costs or str(measured.row_costs),
        measured.draft_cost_ratio if ratio is None else ratio,
    )


def _print_measured(measured: Measured | None, workload: str) -> None:
    if measured is None:
        return
    of = f" on {one_line(workload)}" if workload else ""
    ratio = measured.draft_cost_ratio
    drafts = "drafts for free" if math.isinf(ratio) else f"{ratio:.3g} draft steps to a target step"
    typer.echo(
        f"Measured{of} ({one_line(measured.arm)}): acceptance rate {measured.alpha:.3f}, {drafts}, "
        f"row costs {measured.row_costs}"
    )


def _refuse_without_capacity(flags: Mapping[str, object]) -> None:
    for flag, value in flags.items():
        if value:
            raise typer.BadParameter("needs --capacity", param_hint=flag)


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
        f"  {textbook.passes} target steps\n"
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
    sharing = "" if peak.sessions == 1 else f", {peak.sessions} sessions a step"
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
    colours = ["tab:orange" if row.k == peak.best_k else "tab:blue" for row in peak.rows]
    by_k.bar([row.k for row in peak.rows], [row.gain for row in peak.rows], color=colours)
    by_k.axhline(1.0, color="grey", linewidth=0.8)
    by_k.set(
        title=f"alpha={peak.alpha:g}: peak at k={peak.best_k}",
        xlabel="k (draft tokens a round)",
        ylabel="gain over plain decoding",
    )
    alphas = [step / 100 for step in range(101)]
    best = [max(peak.gain(k, alpha) for k in range(peak.max_k + 1)) for alpha in alphas]
    by_alpha.plot(alphas, best)
    by_alpha.axhline(1.0, color="grey", linewidth=0.8)
    by_alpha.axvline(peak.alpha, color="tab:orange", linewidth=0.8)
    title = "never pays"
    if peak.break_even_alpha is not None:
        by_alpha.axvline(peak.break_even_alpha, color="tab:green", linestyle="--", linewidth=0.8)
        title = f"pays from alpha={peak.break_even_alpha:.3f} on"
    by_alpha.set(title=title, xlabel="alpha (acceptance rate)", ylabel="gain at the best k")
    with usage_of("--plot"):
        figure.savefig(path, format="png", dpi=120)


@dataclass(frozen=True, slots=True)
class _CapacityCase:
    load: Load
    target: TargetSize
    draft: DraftSize
    spares: Spares
    tiers: Tiers
    gpus: int | None  # of a target; None without [target.memory]


def _needed(case: _CapacityCase) -> Capacity:
    return capacity_of(case.load, case.target, case.draft, case.spares, case.tiers)


def _plan_capacity(
    path: Path,
    measured: Measured | None,
    steps: Mapping[str, Any],
    streams: Sequence[int],
    *,
    as_json: bool,
) -> None:
    """Print what the load in the file needs, or with `streams` what so many open streams need.

    Raises typer.BadParameter with the key and its bound.
    """
    try:
        case = _read_case(_completed(_read(path), measured, steps))
        if streams:
            _print_streams(streams, case, as_json=as_json)
            return
        found = _needed(case)
    except InvalidField as fault:
        raise typer.BadParameter(f"{path}: {fault}", param_hint=_CAPACITY) from fault
    if as_json:
        typer.echo(json.dumps(_capacity_as_dict(found, case)))
    else:
        _print_capacity(found, case)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}", param_hint=_CAPACITY) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: must be TOML: {error}", param_hint=_CAPACITY) from error


def _completed(tables: dict[str, Any], measured: Measured | None, steps: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables with the measured values for what they leave out; `steps` precede `measured`."""
    found: dict[str, dict[str, Any]] = {}
    if measured is not None:
        found["target"] = {"step_ms": measured.step_ms, "row_costs": str(measured.row_costs)}
        found["draft"] = {"alpha": measured.alpha, "cost_ratio": measured.draft_cost_ratio}
    if steps:
        found["target"] = {**found.get("target", {}), **steps}
    given = {name: tables.get(name, {}) for name in found}
    if not all(isinstance(table, dict) for table in given.values()):
        return tables  # refused by name when they are read
    if "memory" in given.get("target", {}):
        found["target"].pop("kv_tokens", None)
    return tables | {name: found[name] | given[name] for name in found}


def _read_case(tables: dict[str, Any]) -> _CapacityCase:
    """Return the case; keys are the fields of the classes in `galley.plan.capacity`. Raises InvalidField."""
    for name, table in tables.items():
        if name not in _TABLES:
            raise InvalidField(name, f"must be one of {', '.join(_TABLES)}")
        if not isinstance(table, dict):
            raise InvalidField(name, f"must be a table, got {table!r:.80}")
    target = dict(tables.get("target", {}))
    memory = None
    if ("kv_tokens" in target) == ("memory" in target):
        raise InvalidField("target", "must have either kv_tokens or [target.memory]")
    if "memory" in target:
        memory = _read_as(KvMemory, target.pop("memory"), "target.memory")
        target["kv_tokens"] = memory.tokens(_block_tokens(target))
    if "row_costs" in target:
        target["row_costs"] = RowCostCurve.parse(str(target["row_costs"]))
    return _CapacityCase(
        _read_as(Load, tables.get("load", {}), "load"),
        _read_as(TargetSize, target, "target"),
        _read_as(DraftSize, tables["draft"], "draft") if "draft" in tables else NO_DRAFT,
        _read_as(Spares, tables.get("spares", {}), "spares"),
        _read_as(Tiers, tables.get("tiers", {}), "tiers"),
        memory.gpus if memory is not None else None,
    )


def _block_tokens(target: Mapping[str, Any]) -> int:
    """Return the tokens of a KV block; a value that is no integer is refused with the other keys."""
    given = target.get("block_tokens", BLOCK_TOKENS)
    return given if isinstance(given, int) and not isinstance(given, bool) else BLOCK_TOKENS


def _read_as(what: type[T], table: object, name: str) -> T:
    try:
        strict = checked(what, config=_STRICT, frozen=True)
        return cast("T", TypeAdapter(strict).validate_python(table))
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join((name, *(str(part) for part in problem["loc"])))
        raise InvalidField(where, constraint_of(problem)) from error


def _capacity_as_dict(found: Capacity, case: _CapacityCase) -> dict[str, Any]:
    whole = asdict(found) | {"kv_blocks_a_target": case.target.kv_tokens // case.target.block_tokens}
    return whole if case.gpus is None else whole | {"target_gpus": case.gpus * found.targets}


def _print_streams(streams: Sequence[int], case: _CapacityCase, *, as_json: bool) -> None:
    """Print what each number of open streams needs, of the load's kind."""
    needs = {
        count: _needed(replace(case, load=load_of_streams(count, case.load, case.target, case.draft)))
        for count in streams
    }
    if as_json:
        typer.echo(json.dumps({count: _capacity_as_dict(found, case) for count, found in needs.items()}))
        return
    table = Table(title="What open streams need", title_justify="left", box=SIMPLE_HEAD)
    for name in ("streams", "tokens/s", "targets", "drafts", "gateways", "stores", "GiB", "pools"):
        table.add_column(name, justify="right")
    for count, found in needs.items():
        numbers = (found.targets, found.drafts, found.gateways, found.stores)
        table.add_row(
            f"{count:,}",
            _rate(found.tokens_per_s),
            *(f"{number:,}" for number in numbers),
            _gib(found.store_bytes),
            str(found.pools),
        )
    Console().print(table)


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s < _FEW_TOKENS else f"{tokens_per_s / 1000:,.0f}k"


def _gib(size: int) -> str:
    gib = size / _GIB
    return f"{gib:.2f}" if gib < 1 else f"{gib:,.1f}"


def _print_capacity(found: Capacity, case: _CapacityCase) -> None:
    spares, gpus = case.spares, case.gpus
    blocks = case.target.kv_tokens // case.target.block_tokens
    at, spare = found.at, f"{spares.replicas} of them spare" if spares.replicas else ""
    table = Table(title="What the load needs", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    no_drafts = "drafts cost nothing" if at.k else "no draft token pays"
    devices = "" if gpus is None else f"{gpus * found.targets} GPUs; "
    for row in (
        ("targets", str(found.targets), devices + spare),
        ("drafts", str(found.drafts), spare if found.drafts else no_drafts),
        ("gateways", str(found.gateways), f"bound by {_GATEWAY_BOUNDS[found.gateways_bound_by]}; {spare}"),
        ("stores", str(found.stores), f"{found.store_cores:.2f} cores; beside their replicas"),
        ("pools of replicas", str(found.pools), ""),
        ("sessions at once", f"{found.sessions:.0f}", ""),
        ("memory of the store", f"{found.store_bytes / _GIB:.2f} GiB", "beside Redis' own"),
    ):
        table.add_row(*row)
    Console().print(table)
    bound = {"time": "time per output token", "kv": "KV blocks", "max_sessions": "max_sessions"}
    for line in (
        f"A full target: {at.sessions} sessions at k={at.k} (bound by {bound[found.bound_by]}),",
        (
            f"  {at.tokens_per_s:.0f} tokens/s, {at.time_per_output_token_ms:.1f} ms a token, "
            f"{found.answers_per_s_a_target:.2f} answers/s, {blocks} KV blocks."
        ),
        f"The numbers of replicas assume a load of {spares.busy:.0%} of that.",
    ):
        typer.echo(line)

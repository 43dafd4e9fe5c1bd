"""`galley bench`: measure speculation against plain decoding."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Callable
from pathlib import Path  # Typer reads the annotation
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from galley.bench.workloads import Workload
from galley.cli.flags import (
    API_KEY,
    INTERRUPTED,
    check_plot,
    connect,
    fail_call,
    refuse_typed,
    say,
    stderr_console,
    table_console,
    usage_of,
    with_tls_flags,
    wrong_flag,
)
from galley.cli.up import DraftModel, DType, LogDir, Model, Threads, run_stack, shown_stack, stack_options
from galley.client.options import Tls  # Typer reads the annotation
from galley.common.printable import one_line
from galley.core.trees import MAX_WIDTH
from galley.stack.options import StackOptions

if TYPE_CHECKING:
    from galley.bench.report import Report
    from galley.bench.tuning import Measured, Tuning

T = TypeVar("T")
_NONCE_BYTES = 4
# Flags of the stack that is started without --endpoint, and of a gateway that it names.
_OF_STACK = ("model", "draft_model", "dtype", "threads", "log_dir")
_OF_GATEWAY = ("tls", "tls_ca_file", "tls_cert_file", "tls_key_file", "tls_server_name")
_STRATEGIES = ("off", "auto", "ngram", "model", "hybrid", "features")
_QUICK = {
    "workloads": "chat,rewrite",
    "concurrency": "1,4",
    "strategies": "off,auto",
    "prompts_per_workload": 2,
    "max_tokens": 32,
}
_requests, _speculation = (
    functools.partial(typer.Option, rich_help_panel=panel) for panel in ("Requests", "Speculation")
)


def _apply_quick(context: typer.Context, is_wanted: bool) -> bool:
    if is_wanted:
        # A flag that is given goes before a default.
        context.default_map = {**(context.default_map or {}), **_QUICK}
    return is_wanted


@with_tls_flags
def bench(  # noqa: PLR0913  # one parameter a flag
    *,
    tls: Tls | None,
    quick: Annotated[  # noqa: ARG001  # read by its callback
        bool,
        typer.Option(
            "--quick",
            callback=_apply_quick,
            is_eager=True,
            help="Measure for about three minutes: chat and rewrite, 1 and 4 streams, off and auto, answers "
            "of 32 tokens. Other flags change this.",
        ),
    ] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            help="A running gateway. Default: a stack that is started for the measurement and then stopped. "
            + API_KEY,
            metavar="HOST[:PORT]",
        ),
    ] = None,
    workloads: Annotated[
        str,
        _requests(
            help="chat, code, support, rewrite, tasks, extract, edits, with commas. Default: the first "
            "four; none with --prompts."
        ),
    ] = "",
    prompts: Annotated[
        list[Path] | None,
        _requests(
            help='File of your own prompts: .jsonl of {"prompt": ...} or {"turns": [...]}, or text with a '
            "prompt a line. Repeatable; each file is a workload. Default: none."
        ),
    ] = None,
    by_category: Annotated[
        bool, _requests("--by-category", help="Make each category of questions a workload of its own.")
    ] = False,
    concurrency: Annotated[str, _requests(help="Numbers of concurrent streams, with commas.")] = "1,8,16",
    prompts_per_workload: Annotated[
        int, _requests(min=1, help="Prompts a block; at least two a stream if there are several.")
    ] = 4,
    max_tokens: Annotated[int, _requests(min=1, help="Most output tokens of each answer.")] = 64,
    temperature: Annotated[str, _requests(help="Temperatures, with commas. 0: greedy.")] = "0",
    repeats: Annotated[int, _requests(min=1, help="Repeats; the median of their speed ratios counts.")] = 3,
    seed: Annotated[int, _requests(min=0, help="Seed of the sampling noise.")] = 1,
    strategies: Annotated[
        str,
        _speculation(
            help="Strategies, with commas: off, auto, ngram, model, hybrid, features. Default: all offered."
        ),
    ] = "",
    k: Annotated[str, _speculation(help="Draft tokens a round of fixed strategies, with commas.")] = "4",
    width: Annotated[
        str,
        _speculation(
            help="Most draft tokens for one position of fixed strategies, with commas. "
            "1: chains; above: trees."
        ),
    ] = "1",
    model: Model = "",
    draft_model: DraftModel = None,
    dtype: DType = None,
    threads: Threads = 1,
    log_dir: LogDir = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG file to draw the results into. Default: none.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure speculation against plain decoding: whether it pays, and up to which load.

    Every strategy answers the same prompts in alternating blocks, at each number of streams.
    """
    from galley.bench.tuning import Sizes, Tuning  # noqa: PLC0415  # with grpc and numpy, slow to load

    named = _names(strategies)
    with usage_of("--strategies"):
        for name in named:
            if name not in _STRATEGIES:
                raise ValueError(f"must be one of {', '.join(_STRATEGIES)}, got {name!r}")
    tuning = Tuning(
        workloads=_workloads(workloads, prompts or [], by_category=by_category),
        streams=_numbers(concurrency, int, "--concurrency", least=1),
        strategies=named,
        k=_numbers(k, int, "--k", least=1),
        widths=_widths(width),
        temperatures=_numbers(temperature, float, "--temperature", least=0),
        repeats=repeats,
        # The nonce keeps a gateway that is measured again from finding prompts of earlier runs in its caches.
        sizes=Sizes(prompts_per_workload, max_tokens, seed, secrets.token_hex(_NONCE_BYTES)),
    )
    if plot is not None:
        check_plot(plot)
    if endpoint is None:
        refuse_typed(_OF_GATEWAY, "needs --endpoint")
        options = stack_options(
            strategy=None,
            model=model,
            draft_model=draft_model,
            dtype=dtype,
            threads=threads,
            log_dir=log_dir,
        )
        measured = run_stack(_measure_own(tuning, options))
    else:
        refuse_typed(_OF_STACK, "must not come with --endpoint, which names a stack that runs")
        connection = connect(endpoint, None, 0.0, tls)
        measured = run_stack(_measure(tuning, connection.addresses, connection.tls))
    if measured is None:
        raise typer.Exit(INTERRUPTED)
    _show(measured, tuning, plot, as_json=as_json)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str, kind: Callable[[str], T], flag: str, *, least: float) -> tuple[T, ...]:
    try:
        numbers = tuple(dict.fromkeys(kind(name) for name in _names(text)))
    except ValueError:
        numbers = ()
    # Written so that not-a-number fails too.
    if not numbers or not all(float(number) >= least for number in numbers):  # type: ignore[arg-type]  # int, float
        raise typer.BadParameter(f"must be numbers >= {least:g} with commas, got {text!r}", param_hint=flag)
    return numbers


def _widths(text: str) -> tuple[int, ...]:
    widths = _numbers(text, int, "--width", least=1)
    if max(widths) > MAX_WIDTH:
        raise typer.BadParameter(f"must be numbers <= {MAX_WIDTH}, got {text!r}", param_hint="--width")
    return widths


def _workloads(named: str, files: list[Path], *, by_category: bool) -> tuple[Workload, ...]:
    from galley.bench.workloads import PROMPT_SETS, fixed_workload, own_workload  # noqa: PLC0415

    fixed = _names(named) or (() if files else PROMPT_SETS)
    with usage_of("--workloads"):
        workloads = [*map(fixed_workload, fixed)]
    with usage_of("--prompts"):
        try:
            workloads += map(own_workload, files)
        except OSError as error:
            raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None
        if len({workload.name for workload in workloads}) < len(workloads):
            raise ValueError(f"must have different names, got {[workload.name for workload in workloads]}")
    return tuple(part for one in workloads for part in (one.by_category() if by_category else [one]))


async def _measure_own(tuning: Tuning, options: StackOptions) -> Measured:
    async with shown_stack(options, stderr_console()) as stack:
        return await stack.run(_measure(tuning, stack.gateways[0]))


async def _measure(tuning: Tuning, address: str, tls: Tls | None = None) -> Measured:
    from galley.bench.tuning import measure  # noqa: PLC0415  # with grpc and numpy, slow to load
    from galley.client.client import AsyncClient  # noqa: PLC0415
    from galley.client.errors import BadKey, GalleyRpcError  # noqa: PLC0415

    console = stderr_console()
    bar = Progress(
        TextColumn("measuring"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("[dim]{task.fields[block]}", markup=True, table_column=Column(no_wrap=True)),
        console=console,
        disable=not console.is_terminal,
    )
    task = bar.add_task("measuring", total=1.0, block="")

    def report(line: str) -> None:
        if console.is_terminal:
            bar.update(task, block=escape(line))
        else:
            say(line)

    try:
        with bar:
            async with AsyncClient(address, tls=tls) as client:
                return await measure(tuning, client, report, lambda share: bar.update(task, completed=share))
    except (BadKey, GalleyRpcError) as error:
        raise wrong_flag(getattr(error, "violations", ())) or fail_call(error) from None


def _show(measured: Measured, tuning: Tuning, plot: Path | None, *, as_json: bool) -> None:
    from galley.bench.closed_loop import OFF  # noqa: PLC0415  # with grpc and numpy, slow to load
    from galley.bench.report import as_dict, report_of  # noqa: PLC0415

    report = report_of(measured.blocks, OFF, f"{one_line(measured.model)} and its draft")
    if as_json:
        settings = {
            "model": measured.model,
            "arms": measured.arms,
            "streams": tuning.streams,
            "temperatures": tuning.temperatures,
            "repeats": tuning.repeats,
            "prompts_per_workload": tuning.sizes.prompts,
            "max_tokens": tuning.sizes.max_tokens,
            "seed": tuning.sizes.seed,
            "nonce": tuning.sizes.nonce,
            "prompt_sha256": {workload.name: workload.sha256 for workload in tuning.workloads},
        }
        typer.echo(json.dumps({"asked": settings, **as_dict(report)}))
    else:
        _print(report)
        typer.echo(report.conclusion)
    if plot is not None:
        from galley.bench.plots import draw  # noqa: PLC0415  # matplotlib takes half a second

        with usage_of("--plot"):
            draw(plot, report)
        if not as_json:
            typer.echo(f"Plot: {plot}")


def _print(report: Report) -> None:
    from galley.bench.report import (  # noqa: PLC0415  # after the flags are checked
        acceptance_table,
        prediction_table,
        speed_table,
        tree_table,
        verdict_table,
    )

    console = table_console()
    console.print(speed_table(report.rows, report.baseline))
    console.print(acceptance_table(report.acceptance))
    if any(of.has_trees for of in report.acceptance.values()):
        console.print(tree_table(report.acceptance))
    console.print(prediction_table(report.rows, report.predicted))
    for rows, ms in report.pass_ms:
        console.print(Text(f"a target step over {rows} rows took {ms:.1f} ms"), style="dim")
    console.print(verdict_table(report.gains))

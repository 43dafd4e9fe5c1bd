"""`galley distill`: train a small draft on the answers of a target."""

from __future__ import annotations

import time
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from galley.cli.drafts.learning import Learning, learn, with_learning_flags
from galley.cli.flags import INTERRUPTED, check_plot, fail, require, say, usage_of
from galley.common.models.files import DEFAULT_MODEL
from galley.core.errors import GalleyError, InvalidField
from galley.distill.options import Options

if TYPE_CHECKING:
    from galley.distill.run import Distilled
    from galley.distill.training.evaluation import Acceptance

_LINE_EVERY_S = 10.0
_Files = Annotated[
    list[Path] | None,
    typer.Option(help='JSONL file of prompts: {"prompt": "...", "workload": "..."} a line. Repeatable.'),
]


@with_learning_flags
def distill(  # noqa: PLR0913  # one parameter a flag
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="Draft directory to write.", file_okay=False)],
    *,
    learning: Learning | None,
    target: Annotated[
        str, typer.Option(help="Target model: hub id, directory or GGUF file.")
    ] = DEFAULT_MODEL,
    prompts: _Files = None,
    self_prompts: Annotated[
        int, typer.Option(help="Number of further prompts that the target generates.")
    ] = 0,
    corpus: Annotated[
        list[Path] | None,
        typer.Option(help="npz file of prompts with answers, instead of prompts. Repeatable."),
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="npz file to measure on, with --corpus. Default: --held-out-share.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Draft directory to compare with. Default: none.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(help="Draft directory to start from; missing layers are added. Default: the target."),
    ] = None,
    layers: Annotated[int, typer.Option(help="Number of the target's first layers to copy.")] = 2,
    head: Annotated[
        int, typer.Option(help="Size of the draft's vocabulary: the most frequent tokens; not with --start.")
    ] = 8192,
    tokens: Annotated[int, typer.Option(help="Number of answer tokens to train on.")] = 4_000_000,
    batch: Annotated[int, typer.Option(help="Tokens a training step, prompts included.")] = 2048,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    hardness: Annotated[
        float, typer.Option(help="Weight of the target's likeliest token in a label, in [0, 1].")
    ] = 0.5,
    scored: Annotated[
        float,
        typer.Option(
            help="Share of the sampled answers labelled with the target's probabilities, in [0, 1]."
        ),
    ] = 0.25,
    answer: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 200,
    temperature: Annotated[float, typer.Option(help="Temperature of the sampled half of the answers.")] = 0.8,
    held_out_share: Annotated[
        float, typer.Option(help="Share of the prompts to measure on, in [0.001, 0.5].")
    ] = 0.03,
    evaluate_every: Annotated[
        int, typer.Option(help="Number of answer tokens between measurements.")
    ] = 1_000_000,
    features: Annotated[
        bool,
        typer.Option("--features", help="Train a draft that also reads the target's states. Not served yet."),
    ] = False,
    collected: Annotated[
        int,
        typer.Option(help="Most tokens of conversations to train on with --features; bounds the disk used."),
    ] = 400_000,
    work: Annotated[
        Path | None,
        typer.Option(help="Directory of answers and checkpoints. Default: OUT.work.", file_okay=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="PNG file to draw the acceptance into. Default: none.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Number format: float32 or bfloat16.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Number of threads.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the order, the answers and the noise.")] = 1,
) -> None:
    """Train a small draft for a target, from the target's own answers to your prompts.

    The same command continues a run that was stopped. `galley draft --model OUT` loads the result.
    """
    given = {name: value for name, value in locals().items() if name not in {"context", "learning"}}
    require("draft")
    if learning is not None:
        learn(learning, context, given)
        return
    from galley.engine.load.resolve import resolve_model  # noqa: PLC0415

    if features and plot is not None:
        raise typer.BadParameter("must not be set with --features, which draws nothing", param_hint="--plot")
    console = Console(highlight=False)
    try:
        options = Options(
            **{name: given[name] for name in Options.__dataclass_fields__ if name in given}
            | {
                "target": resolve_model(target),
                "named": Path(target).name if Path(target).exists() else target,
                "work": work or out.with_name(out.name + ".work"),
                "prompts": tuple(prompts or ()),
                "corpus": tuple(corpus or ()),
            }
        )
        options.check()
        if plot is not None:
            check_plot(plot)
        if features:
            _distill_features(options, console)
            return
        from galley.distill.run import distil  # noqa: PLC0415  # imports torch

        with Display(console) as display:
            result = distil(options, display)
    except InvalidField as fault:
        hint = "--" + fault.field.replace("_", "-")
        raise typer.BadParameter(fault.problem, param_hint=hint) from fault
    except (GalleyError, OSError) as error:
        raise fail(error) from error
    except KeyboardInterrupt:
        say("stopped; the same command continues from the last checkpoint")
        raise typer.Exit(INTERRUPTED) from None
    _show(result, options, console)
    if plot is not None:
        from galley.distill.run import plot as draw  # noqa: PLC0415  # imports torch

        with usage_of("--plot"):
            draw(plot, result.curve, result.against)
        typer.echo(f"Plot: {plot}")
    typer.echo(f"next: galley bench --quick --model {quote(target)} --draft-model {quote(str(out))}")


def _distill_features(options: Options, console: Console) -> None:
    from galley.distill.features.run import distil_features  # noqa: PLC0415  # imports torch

    with Display(console) as display:
        measured = distil_features(options, display)
    table = Table(title="Acceptance on held-out prompts", title_justify="left")
    for name in ("temperature", "draft", "first", "second", "third", "per round"):
        table.add_column(name, justify="left" if name == "draft" else "right")
    for temperature in measured["features"]:
        for name, by_temperature in measured.items():
            one = by_temperature[temperature]["all"]
            shares = [f"{share:.3f}" for share in one.by_depth[:3]]
            table.add_row(temperature, name, *shares, f"{one.accepted_per_round:.2f}")
    console.print(table)
    console.print(Text(f"draft: {options.out}"), soft_wrap=True)


class Display:
    """The progress of a run: bars on a terminal, plain lines elsewhere. Implements `Reports`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description:>9}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style="dim"),
            console=console,
            disable=not console.is_terminal,
        )
        self._name, self._total, self._said_at = "", 0, 0.0
        self._task: TaskID | None = None

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def stage(self, name: str, total: int) -> None:
        self._name, self._total, self._said_at = name, total, time.monotonic()
        self._task = self._bars.add_task(name, total=total, note="")

    def done(self, units: int, note: str = "") -> None:
        if self._task is not None:
            self._bars.update(self._task, completed=units, note=note)
        now = time.monotonic()
        if self._console.is_terminal or (now - self._said_at < _LINE_EVERY_S and units < self._total):
            return
        self._said_at = now
        self._say(f"{self._name}: {units:,} of {self._total:,} {note}".rstrip())

    def measured(self, seen: int, acceptance: dict[str, Acceptance]) -> None:
        shares = ", ".join(f"{name} {one.greedy:.3f}" for name, one in acceptance.items())
        self._say(f"greedy acceptance after {seen:,} tokens: {shares}")

    def _say(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def _show(result: Distilled, options: Options, console: Console) -> None:
    from galley.distill.training.evaluation import ROUND_K, TEMPERATURE  # noqa: PLC0415  # imports torch

    table = Table(title="Acceptance on held-out prompts", title_justify="left")
    table.add_column("workload")
    for name in ("greedy", f"per round, k={ROUND_K}", f"temperature {TEMPERATURE:g}", "--against, greedy"):
        table.add_column(name, justify="right")
    for name, one in result.acceptance.items():
        present = result.against[name].greedy if result.against else None
        table.add_row(
            name,
            f"{one.greedy:.3f}",
            f"{one.accepted_per_round:.2f}",
            f"{one.sampled:.3f}",
            "" if present is None else f"{present:.3f}",
        )
    console.print(table)
    console.print(Text(f"draft: {options.out}"), soft_wrap=True)

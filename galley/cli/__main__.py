"""The `galley` command: the local stack, its clients, the demo, the cost model, and the services themselves.

What is slow to load (torch, grpc, protobuf, matplotlib) is loaded by the commands that need it.
"""

from __future__ import annotations

import os
from typing import Annotated, NoReturn

import typer

from galley.cli.bench import bench
from galley.cli.demo import demo
from galley.cli.distill import distill
from galley.cli.generate import chat, generate, resume
from galley.cli.plan import plan
from galley.cli.top import top
from galley.cli.trace import trace
from galley.cli.up import up
from galley.stack.parts import python_module
from galley.version import __version__

app = typer.Typer(
    name="galley",
    help="Serves language models by speculative decoding; clients receive only what the target confirmed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_STACK, _CLIENTS, _PARTS = "The local stack", "Clients of a gateway", "One part alone"
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app.command(rich_help_panel=_STACK)(demo)
app.command(rich_help_panel=_STACK)(up)
app.command(rich_help_panel=_STACK)(top)
app.command(rich_help_panel=_CLIENTS)(generate)
app.command(rich_help_panel=_CLIENTS)(chat)
app.command(rich_help_panel=_CLIENTS)(resume)
app.command(rich_help_panel=_STACK)(trace)
app.command()(plan)
app.command()(bench)
app.command()(distill)


@app.command(rich_help_panel=_PARTS, context_settings=_PASS_ON, add_help_option=False)
def gateway(context: typer.Context) -> None:
    """Run a gateway, with its own flags: galley gateway --help."""
    _become("services.gateway", context.args)


@app.command(rich_help_panel=_PARTS, context_settings=_PASS_ON, add_help_option=False)
def draft(context: typer.Context) -> None:
    """Run a draft, with its own flags: galley draft --help."""
    _become("services.draft", context.args)


@app.command(rich_help_panel=_PARTS, context_settings=_PASS_ON, add_help_option=False)
def target(context: typer.Context) -> None:
    """Run a target, with its own flags: galley target --help."""
    _become("services.target", context.args)


@app.command(rich_help_panel=_PARTS)
def prepare(
    model: Annotated[str, typer.Argument(help="Hub id, directory or GGUF. Default: the small one.")] = "",
) -> None:
    """Fetch or convert a model once, and print its directory."""
    _become("galley.engine.load.resolve", [model] if model else [])


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _become(module: str, args: list[str]) -> NoReturn:
    """The same process goes on as the service, so that signals and exit codes are its own."""
    command = python_module(module, *args)
    os.execv(command[0], command)  # noqa: S606  # no shell is what is wanted


def main() -> None:
    """The entry point."""
    app()


if __name__ == "__main__":
    main()

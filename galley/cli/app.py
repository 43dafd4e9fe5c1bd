"""The `galley` command: its commands, and how wrong usage is reported.

What is slow to load (torch, grpc, protobuf, matplotlib) is loaded by the commands that need it.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]  # there is no other way
from typer.core import TyperGroup

from galley.cli.audit import audit
from galley.cli.bench import bench
from galley.cli.chat.command import chat
from galley.cli.config import keep_config, kept_config, label, with_config_flag
from galley.cli.demo import demo
from galley.cli.distill import distill
from galley.cli.drafts.command import drafts
from galley.cli.flags import FAILED, USAGE, Output, fail, require, say
from galley.cli.generate import generate, resume
from galley.cli.planning.check import check
from galley.cli.planning.plan import plan
from galley.cli.stacks import logs, ps, stop
from galley.cli.top import top
from galley.cli.trace import trace
from galley.cli.up import serve, up
from galley.stack.parts import python_module
from galley.version import __version__

_USE, _MEASURE, _SERVERS = "Run and use", "Measure and plan", "Servers"
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
_UsageError: Any = typer.BadParameter.__base__
_ClickException: Any = _UsageError.__base__
_NUMBER_PROBLEMS = {
    "less_than_equal": "must be at most {le}, got {got}",
    "greater_than_equal": "must be at least {ge}, got {got}",
    "int_parsing": "must be a whole number, got {got!r}",
    "float_parsing": "must be a number, got {got!r}",
}
_QUOTE = "'"
_CHOICE = re.compile(r"(Value error, )?(?P<given>'.*') is not one of (?P<choices>.*)")


class _Group(TyperGroup):
    """A command group that reports wrong usage in one line, with exit code 2."""

    def main(
        self, args: Sequence[str] | None = None, *_: Any, standalone_mode: bool = True, **extra: Any
    ) -> Any:
        extra["prog_name"] = "galley"
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A terminal that is not UTF-8 shows "?" for characters that it lacks.
                stream.reconfigure(errors="replace")
        try:
            code = super().main(args, standalone_mode=False, **extra)
        except _ClickException as error:
            if error.format_message():  # A group without a command has printed its help, and has none.
                say(f"error: {_usage_problem(error)}", style="red")
            code = USAGE
        except typer.Abort:
            code = FAILED
        if Output.is_unread:
            code = FAILED
        if not standalone_mode:
            return code
        sys.exit(code or 0)


def _usage_problem(error: Any) -> str:
    parameter: Any = getattr(error, "param", None)
    hint, message = getattr(error, "param_hint", None), getattr(error, "message", None)
    if isinstance(error, typer.BadParameter) and message and (hint or parameter):
        is_flag = parameter is not None and parameter.param_type_name == "option"
        flag = max(parameter.opts, key=len) if is_flag else str(getattr(parameter, "name", "")).upper()
        name = hint or label(error.ctx, parameter) or flag
        message = _number_problem(error) or message
        if choice := _CHOICE.fullmatch(message.rstrip(".")):
            message = f"must be one of {choice['choices'].replace(_QUOTE, '')}, got {choice['given']}"
        problem = f"{name}: {message}"
    else:
        problem = str(error.format_message())
    command = error.ctx.command_path if getattr(error, "ctx", None) else "galley"
    return f"{problem.rstrip('.')} (see {command} --help)"


def _number_problem(error: BaseException) -> str:
    """Return what is wrong with a number, as the error's cause reports it; "" for other problems."""
    cause: Any = error.__cause__
    if not hasattr(cause, "errors"):  # of pydantic
        return ""
    problem = cause.errors()[0]
    template = _NUMBER_PROBLEMS.get(problem["type"])
    return template.format(got=problem["input"], **problem.get("ctx", {})) if template else ""


app = typer.Typer(
    name="galley",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serve language models by speculative decoding.",
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"galley {__version__}")
        raise typer.Exit


@app.callback()
def _galley(
    *,
    version: Annotated[  # noqa: ARG001  # read by its callback
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    config: Annotated[  # noqa: ARG001  # read by its callback
        Path | None,
        typer.Option(
            callback=keep_config, envvar="GALLEY_CONFIG", help="Configuration file, as --config of a command."
        ),
    ] = None,
) -> None:
    # An argument that is not UTF-8 could not be sent to a gateway.
    for argument in sys.argv[1:]:
        if not argument.isascii() and any("\ud800" <= character <= "\udfff" for character in argument):
            raise typer.BadParameter("must be UTF-8 text", param_hint=ascii(argument))


for _command in (demo, up, serve, ps, logs, stop, generate, chat, resume, audit, top, trace):
    app.command(rich_help_panel=_USE)(with_config_flag(_command, "up" if _command is serve else ""))
app.add_typer(drafts, rich_help_panel=_USE)
for _command in (check, bench, plan, distill):
    app.command(rich_help_panel=_MEASURE)(with_config_flag(_command))


def _service(role: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        config = kept_config(context)
        given = ["--config", str(config)] if config is not None else []
        _become(role, f"services.{role}", [*given, *context.args])

    run.__doc__ = f"Run a {role}; `galley {role} --help` lists its settings."
    return run


for _role in ("gateway", "draft", "target"):
    _settings: Any = {"context_settings": _PASS_ON, "add_help_option": False}
    app.command(_role, rich_help_panel=_SERVERS, **_settings)(_service(_role))


@app.command(rich_help_panel=_SERVERS)
def prepare(
    model: Annotated[
        str, typer.Argument(help="Hub id, directory or GGUF file. Default: the model that Galley brings.")
    ] = "",
) -> None:
    """Download or convert a model, and print its directory."""
    _become("target", "galley.engine.load.resolve", [model] if model else [])


@app.command()
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell.")],
) -> None:
    """Print a script that completes commands and flags: `source <(galley completion bash)`."""
    typer.echo(get_completion_script(prog_name="galley", complete_var="_GALLEY_COMPLETE", shell=shell))


def _become(extra: str, module: str, args: list[str]) -> NoReturn:
    """Replace this process by the module, which then gets the signals and sets the exit code."""
    require(extra)
    command = python_module(module, *args)
    try:
        os.execv(command[0], command)  # noqa: S606  # without a shell on purpose
    except OSError as error:
        raise fail(f"{command[0]}: cannot be run: {error.strerror}") from None

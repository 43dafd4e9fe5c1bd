"""What the benchmarks that compare whole stacks have in common, from their options to their report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console

from bench.harness import commit, machine, result_path
from bench.loop_run import keep_to_cores
from galley.common.config.defaults import DEFAULT_MODEL
from galley.engine.load.resolve import resolve_model


class Measured(Protocol):
    """What a benchmark that compares whole stacks is told."""

    @property
    def cores(self) -> int:
        """Of this machine, for all that it starts."""

    @property
    def model(self) -> str:
        """Empty: the default one."""


class Measurement(Protocol):
    """What came of it."""

    @property
    def facts(self) -> dict[str, Any]:
        """What stands beside the figures."""


_O = TypeVar("_O", bound=Measured)
_R = TypeVar("_R", bound=Measurement)


def measure_and_report(
    name: str,
    options: _O,
    root: Path | None,
    width: int,
    measure: Callable[[_O, Path, Callable[[str], None]], Coroutine[None, None, _R]],
    report: Callable[[_R, _O, Console, dict[str, Any], Path | None], object],
) -> None:
    """The whole of a benchmark's `main` once its options are read; `root` is None for no record.

    Into a file or a pipe lines are `width` wide, for the tables, whatever the terminal is.
    """
    console = Console()
    if not console.is_terminal:
        console.width = width
    where: dict[str, Any] = {"commit": commit(), "machine": machine()}
    record = None if root is None else result_path(name, where["commit"], root)
    cores, began_s = keep_to_cores(options.cores), time.perf_counter()
    outcome = asyncio.run(
        measure(
            options,
            resolve_model(options.model or DEFAULT_MODEL),
            lambda said: console.print(said, style="dim"),
        )
    )
    outcome.facts.update({"cores": cores, "took_s": round(time.perf_counter() - began_s)})
    report(outcome, options, console, where, record)

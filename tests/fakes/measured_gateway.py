"""A gateway that measures its event loop: `python -m tests.fakes.measured_gateway FLAGS`.

It runs as in production, but without uvloop, whose turns cannot be measured. Each turn that takes a
millisecond of CPU time or more is appended to the file that GALLEY_TURNS names, as a line of JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

SHORT_NS = 1_000_000
FILE = "GALLEY_TURNS"


@dataclass(frozen=True, slots=True)
class Turn:
    """One callback of an event loop: while it runs, every other call waits."""

    ms: float
    gc_ms: float
    name: str

    @property
    def own_ms(self) -> float:
        return self.ms - self.gc_ms


class Turns:
    """The turns that a gateway has measured, as a test reads them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        path.touch()

    def take(self) -> list[Turn]:
        """Return the turns since the last call."""
        lines = self._path.read_text().splitlines()
        taken, self._read = lines[self._read :], len(lines)
        return [Turn(**json.loads(line)) for line in taken]


def measure(path: Path) -> None:
    """Measure all turns of this process from now on.

    CPU time of the thread: a busy machine lengthens no turn.
    """
    run, out = asyncio.Handle._run, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    collected_ns = 0

    def collecting(phase: str, _: object) -> None:
        nonlocal collected_ns
        collected_ns += time.thread_time_ns() * (1 if phase == "stop" else -1)

    def measured(handle: Any) -> None:
        nonlocal collected_ns
        name, collected_ns, began_ns = _name(handle), 0, time.thread_time_ns()
        run(handle)
        took_ns = time.thread_time_ns() - began_ns
        if took_ns >= SHORT_NS:
            turn = Turn(took_ns / 1e6, collected_ns / 1e6, f"{name} → {_name(handle)}")
            os.write(out, json.dumps(asdict(turn)).encode() + b"\n")

    gc.callbacks.append(collecting)
    cast("Any", asyncio.Handle)._run = measured


def _name(handle: Any) -> str:
    """Return where the task of a turn waits, innermost last, or the function that the turn calls."""
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    names: list[str] = []
    waiting = cast("Any", task.get_coro())
    while waiting is not None and len(names) < 30:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "ag_frame", None)
        if frame is not None:
            names.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        if type(waiting).__name__ in {"coroutine_wrapper", "async_generator_asend"}:  # these hide it
            waiting = next(iter(gc.get_referents(waiting)), None)
        else:
            waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)
    return " ".join(names[-3:]) or "done"


def main() -> None:
    sys.modules["uvloop"] = cast("Any", None)  # cannot be imported
    measure(Path(os.environ[FILE]))
    from galley.common.server.server import run_main  # noqa: PLC0415  # after what it imports was replaced
    from services.gateway.service import prepare  # noqa: PLC0415
    from services.gateway.settings import GatewaySettings  # noqa: PLC0415

    run_main(GatewaySettings, "gateway", "A gateway that is measured.", prepare)


if __name__ == "__main__":
    main()

"""Measure the turns of a service's event loop, in the process of the service, and bound them in a test.

A bound is one of work, measured in time. On a slower machine, or one whose cores are shared, it grows as the
time of a fixed piece of work, which is measured right after each turn beyond the bound.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.waiting import PATIENCE_S

MOST_MS = 5.0
MOST_GC_MS = 15.0
"""A collection of garbage in a turn counts apart: it visits what all calls have made."""
TRIES = 8
"""Each case counts with its best try: what else runs on the machine costs CPU time, too."""
WORK_MS = 2.0
"""CPU time of `work` where the bounds hold as they are."""
MOST_SLOWNESS = 3.0
"""Beyond that a machine says nothing of turns."""
WORK = pb.TokenIds(ids=[1000 + index % 130_072 for index in range((1 << 18) - 100)]).SerializeToString()
SHORT_NS = 1_000_000
_TICK_S = 0.0005
_SWITCH_S = 0.05
"""A thread may keep the interpreter lock for ten times as long as usual, so its work is seen as one piece."""
FILE = "GALLEY_TURNS"


@dataclass(frozen=True, slots=True)
class Turn:
    """One callback of an event loop: while it runs, every other call waits."""

    ms: float
    gc_ms: float
    name: str
    in_thread: bool = False
    """What held the interpreter lock, so that the event loop could not run, was another thread."""

    @property
    def own_ms(self) -> float:
        return self.ms - self.gc_ms


class Turns:
    """The turns that a service has measured, as a test reads them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        path.touch()

    def take(self) -> list[Turn]:
        """Return the turns since the last call."""
        lines = self._path.read_text().splitlines()
        taken, self._read = lines[self._read :], len(lines)
        return [Turn(**json.loads(line)) for line in taken]


def measure(*, threads: bool = False) -> None:
    """Measure all turns of this process from now on. Call it before anything imports uvloop.

    Without uvloop, whose turns cannot be measured, each turn that takes a millisecond of CPU time or more is
    appended to the file that GALLEY_TURNS names, as a line of JSON. A busy machine lengthens no turn.
    With `threads`, so is what other threads do while they hold the interpreter lock.
    """
    sys.modules["uvloop"] = cast("Any", None)  # cannot be imported
    run, out = asyncio.Handle._run, os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
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
    if threads:
        sys.setswitchinterval(_SWITCH_S)
        threading.Thread(target=_watch_lock, args=(threading.get_ident(), out), daemon=True).start()


def _watch_lock(loop: int, out: int) -> None:
    """Note how long threads other than the `loop` hold the interpreter lock, as turns.

    Compare their CPU times before and after a short sleep, which ends once this thread has the lock. Threads
    that have released it use little more than the sleep is long. The time in which this thread waited for a
    CPU does not count.
    """
    state, me = os.open("/proc/thread-self/schedstat", os.O_RDONLY), threading.get_ident()

    def used_ns() -> dict[int, int]:
        idents = [one.ident for one in threading.enumerate() if one.ident not in {None, loop, me}]
        return {one: time.clock_gettime_ns(time.pthread_getcpuclockid(one)) for one in idents if one}

    while True:
        waited_ns = -int(os.pread(state, 64, 0).split()[1])
        before = used_ns()
        time.sleep(_TICK_S)
        after = used_ns()
        waited_ns += int(os.pread(state, 64, 0).split()[1])
        took = {one: used - before.get(one, 0) for one, used in after.items()}
        took_ns = sum(took.values()) - waited_ns
        if took_ns >= SHORT_NS:
            frame = sys._current_frames().get(max(took, key=took.__getitem__))
            names: list[str] = []
            while frame is not None and len(names) < 3:
                names.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
                frame = frame.f_back
            turn = Turn(took_ns / 1e6, 0.0, f"before {' '.join(reversed(names))}", in_thread=True)
            os.write(out, json.dumps(asdict(turn)).encode() + b"\n")


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


def work() -> None:
    """Take CPU time as a service does: in libraries and in Python, about 4 to 1."""
    pb.TokenIds.FromString(WORK)
    for _ in range(20_000):
        pass


def slowness() -> float:
    """Return how many times WORK_MS the work takes now, but at least 1 and at most MOST_SLOWNESS."""
    took_ns = []
    for _ in range(5):
        began_ns = time.thread_time_ns()
        work()
        took_ns.append(time.thread_time_ns() - began_ns)
    return min(max(1.0, min(took_ns) / 1e6 / WORK_MS), MOST_SLOWNESS)


def excess(turn: Turn, most_thread_ms: float = MOST_MS) -> float:
    """Return how many times its bound a turn takes."""
    most_ms = most_thread_ms if turn.in_thread else MOST_MS
    return max(turn.own_ms / most_ms, turn.gc_ms / MOST_GC_MS)


async def too_long(
    turns: Turns, case: Callable[[], Awaitable[object]], most_thread_ms: float = MOST_MS
) -> str:
    """Return a description of a turn of `case` if its longest is beyond the bounds in each try."""
    tried = ""
    for _ in range(TRIES):
        turns.take()
        async with asyncio.timeout(PATIENCE_S):
            await case()
        of = partial(excess, most_thread_ms=most_thread_ms)
        turn = max(turns.take(), key=of, default=Turn(0.0, 0.0, ""))
        if of(turn) <= 1 or of(turn) <= (slow := slowness()):
            return ""
        where = "in a thread " if turn.in_thread else ""
        tried = f"{turn.ms:.1f} ms ({turn.gc_ms:.1f} garbage; bounds × {slow:.1f}) {where}{turn.name}"
    return tried

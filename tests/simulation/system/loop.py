"""An event loop on virtual time: it never waits, and runs the same calls in the same order each time.

If nothing is ready, time jumps to the next timer; without a timer the loop raises `Deadlock`. Work for
another thread runs in the loop, once the time that it takes is over.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MOST_TURNS = 400_000
"""Most turns of the loop in one schedule; with more, it runs for ever without time passing."""
_RESOLUTION_S = 1e-9
"""Timers that are so close to each other are due in one turn."""


_CLOCKED = (
    "services.target.loop",
    "services.target.servicer",
    "services.draft.loop",
    "services.draft.servicer",
    "services.gateway.generation",
    "galley.client.streams",
)
"""Modules that read the clock of the system rather than a clock port."""


class _VirtualTime:
    @staticmethod
    def monotonic() -> float:
        return asyncio.get_running_loop().time()

    @staticmethod
    def monotonic_ns() -> int:
        return round(asyncio.get_running_loop().time() * 1e9)

    @staticmethod
    def time_ns() -> int:
        """Return the wall clock of the process, which can be set."""
        process = _CURRENT.get()
        ahead_s = 1_700_000_000.0 if process is None else process.wall_s
        return round((asyncio.get_running_loop().time() + ahead_s) * 1e9)


@contextmanager
def virtual_time() -> Iterator[None]:
    """Replace the clocks of `_CLOCKED`, and the client's randomness; `mock` would take 2 % of a schedule."""
    replaced: dict[tuple[str, str], object] = {(name, "time"): _VirtualTime for name in _CLOCKED}
    replaced["galley.client.streams", "random"] = random.Random(0)
    before = {(name, what): getattr(sys.modules[name], what) for name, what in replaced}
    _set(replaced)
    try:
        yield
    finally:
        _set(before)


def _set(attributes: Mapping[tuple[str, str], object]) -> None:
    for (name, what), value in attributes.items():
        setattr(sys.modules[name], what, value)


class Deadlock(Exception):
    """Nothing is ready and no timer is set."""


class Livelock(Exception):
    """The loop has run more iterations than any schedule takes."""


class Process:
    """One process: its tasks, and how fast it computes. After a crash it has no effect."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.compute_s = 0.001
        self.slow = 1.0
        self.wall_s = 1_700_000_000.0
        self.frozen_until = 0.0
        self.died_s = 0.0

    @property
    def tasks(self) -> list[SimTask]:
        """Return its tasks that have not ended, in the order of their creation."""
        mine = [task for task in asyncio.all_tasks() if isinstance(task, SimTask) and task.process is self]
        return sorted(mine, key=_number_of)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        before = _CURRENT.set(self)
        try:
            return asyncio.get_running_loop().create_task(work)
        finally:
            _CURRENT.reset(before)

    def call(self, function: Callable[..., T], *args: object) -> T:
        before = _CURRENT.set(self)
        try:
            return function(*args)
        finally:
            _CURRENT.reset(before)

    def crash(self) -> None:
        self.alive = False
        self.died_s = asyncio.get_running_loop().time()
        for task in self.tasks:
            task.cancel()


_CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


class SimTask(asyncio.Task[Any]):
    """A task of a process, hashed by its number, so that sets of tasks have an order."""

    def __init__(
        self,
        coro: Any,
        number: int,
        process: Process | None,
        loop: SimLoop,
        context: Context | None,
    ) -> None:
        self.number = number
        self.process = process
        super().__init__(coro, loop=loop, name="of the simulation", context=context)

    def __hash__(self) -> int:
        return self.number


def _number_of(task: SimTask) -> int:
    return task.number


class _Callback(asyncio.TimerHandle):
    """A call of the loop, at a time or soon: it holds what it runs, and no more."""

    __slots__ = ()

    def __init__(  # the other attributes are for debugging
        self, when_s: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> None:
        self._when = when_s
        self._callback = callback
        self._args = args
        self._context = copy_context() if context is None else context
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = _nothing, ()


def _nothing() -> None:
    """Do nothing: what was to be called has been cancelled."""


class SimLoop(asyncio.BaseEventLoop):
    """The loop of one schedule; the module states its rules.

    A turn of the loop takes a few instructions, because a schedule has thousands of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.turns = 0
        self._task_numbers = 0
        self._soon: deque[_Callback] = deque()
        self._timers: list[tuple[float, int, _Callback]] = []
        self._timer_numbers = 0

    def time(self) -> float:
        return self.now_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = _Callback(self.now_s, callback, args, context)
        self._soon.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # there are no other threads

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        when_s = self.now_s + delay
        handle = _Callback(when_s, callback, args, context)
        self._timer_numbers += 1
        heappush(self._timers, (when_s, self._timer_numbers, handle))
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = _Callback(when, callback, args, context)
        self._timer_numbers += 1
        heappush(self._timers, (when, self._timer_numbers, handle))
        return handle

    def _run_once(self) -> None:
        """Run what is ready; if nothing is, move on to the next timers. Return once the loop is stopped."""
        soon = self._soon
        while not self._stopping:  # type: ignore[attr-defined]
            self.turns += 1
            if self.turns > MOST_TURNS:
                raise Livelock
            if not soon:
                self._move_on()
            for _ in range(len(soon)):
                handle = soon.popleft()
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001  # as in every loop
                    self.call_exception_handler({"message": "in a callback", "exception": error})

    def _move_on(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not timers:
            raise Deadlock
        when_s = timers[0][0]
        self.now_s = max(self.now_s, when_s)
        due_s = self.now_s + _RESOLUTION_S
        while timers and timers[0][0] < due_s:
            self._soon.append(heappop(timers)[2])

    def run_in_executor(self, _executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        process = _CURRENT.get()
        done: asyncio.Future[T] = self.create_future()
        delay_s = 0.001 if process is None else process.compute_s * process.slow
        frozen_s = 0.0 if process is None else max(0.0, process.frozen_until - self.now_s)
        self.call_later(delay_s + frozen_s, self._carry_out, process, done, func, args)
        return done

    @staticmethod
    def _carry_out(
        process: Process | None, done: asyncio.Future[T], func: Callable[..., T], args: tuple[Any, ...]
    ) -> None:
        if done.done() or (process is not None and not process.alive):
            return
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  # as an executor hands it over
            done.set_exception(error)

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> SimTask:
        process = _CURRENT.get()
        if context is not None:
            context.run(_CURRENT.set, process)
        self._task_numbers += 1
        task = SimTask(coro, self._task_numbers, process, self, context)
        if process is not None and not process.alive:
            task.cancel()
        return task

"""An event loop on virtual time: it never waits, and runs the same calls in the same order each time.

If nothing is ready, time jumps to the next timer; without a timer the loop raises `Deadlock`. Work for
another thread runs in the loop, once the time that it takes is over.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from heapq import heappop, heappush
from itertools import repeat
from typing import Any, TypeVar, TypeVarTuple, cast

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
    "services.gateway.audit.auditor",
    "services.gateway.audit.verification",
    "galley.client.streams",
)
"""Modules that read the clock of the system rather than a clock port."""


class _VirtualTime:
    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def monotonic(self) -> float:
        return self._loop.now_s

    def monotonic_ns(self) -> int:
        return round(self._loop.now_s * 1e9)

    def time_ns(self) -> int:
        """Return the wall clock of the process, which can be set."""
        process = _CURRENT.get()
        ahead_s = 1_700_000_000.0 if process is None else process.wall_s
        return round((self._loop.now_s + ahead_s) * 1e9)


class _Secrets:
    """What `secrets` draws, the same in each run."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def token_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def token_hex(self, count: int) -> str:
        return self.token_bytes(count).hex()


@contextmanager
def virtual_time(loop: SimLoop) -> Iterator[None]:
    """Replace the clocks of `_CLOCKED`, and the client's randomness; `mock` would take 2 % of a schedule.

    asyncio's look-ups of the loop and the task are replaced, too: each makes a call of the operating system.
    """
    time = _VirtualTime(loop)
    replaced: dict[tuple[str, str], object] = {(name, "time"): time for name in _CLOCKED}
    replaced["galley.client.streams", "random"] = random.Random(0)
    replaced["services.gateway.audit.verification", "secrets"] = _Secrets()
    running, tasks = repeat(loop).__next__, cast("Any", asyncio.tasks)._current_tasks
    for name in ("asyncio", "asyncio.events"):
        replaced |= {(name, "get_running_loop"): running, (name, "_get_running_loop"): running}
    for name in ("asyncio", "asyncio.tasks"):
        replaced[name, "current_task"] = lambda: tasks.get(loop)
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


_WHEN, _CALLBACK, _ARGS, _CONTEXT = 0, 2, 3, 4


class _Callback(list[Any]):
    """A call of the loop, at a time or soon: [time, number, function, arguments, context].

    A list is made without a call of Python, and is in order in a heap as it is.
    """

    __slots__ = ()

    def cancel(self) -> None:
        self[_CALLBACK], self[_ARGS] = _nothing, ()

    def cancelled(self) -> bool:
        return self[_CALLBACK] is _nothing

    def when(self) -> float:
        when_s: float = self[_WHEN]
        return when_s


def running_loop() -> SimLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return loop


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
        self._soon: list[_Callback] = []
        self._timers: list[_Callback] = []
        self._timer_numbers = 0
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]

    get_debug = staticmethod(bool)  # False, without a call of Python for each future

    def time(self) -> float:
        return self.now_s

    def _check_running(self) -> None:
        """Do nothing: while time is virtual, this loop counts as running."""

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        in_context = copy_context() if context is None else context
        handle: Any = _Callback((self.now_s, 0, callback, args, in_context))
        self._soon.append(handle)
        return handle  # type: ignore[no-any-return]  # it can be cancelled, as a Handle

    call_soon_threadsafe = call_soon  # there are no other threads

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._timer_numbers += 1
        in_context = copy_context() if context is None else context
        handle: Any = _Callback((self.now_s + delay, self._timer_numbers, callback, args, in_context))
        heappush(self._timers, handle)
        return handle  # type: ignore[no-any-return]

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._timer_numbers += 1
        in_context = copy_context() if context is None else context
        handle: Any = _Callback((when, self._timer_numbers, callback, args, in_context))
        heappush(self._timers, handle)
        return handle  # type: ignore[no-any-return]

    def _run_once(self) -> None:
        """Run what is ready; if nothing is, move on to the next timers. Return once the loop is stopped."""
        while not self._stopping:  # type: ignore[attr-defined]
            self.turns += 1
            if self.turns > MOST_TURNS:
                raise Livelock
            if not self._soon:
                self._move_on()
            ready, self._soon = self._soon, []
            for handle in ready:
                try:
                    handle[_CONTEXT].run(handle[_CALLBACK], *handle[_ARGS])
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001  # as in every loop
                    self.call_exception_handler({"message": "in a callback", "exception": error})

    def _move_on(self) -> None:
        timers, soon = self._timers, self._soon
        while not soon:
            if not timers:
                raise Deadlock
            timer = heappop(timers)
            if timer[_CALLBACK] is not _nothing:
                soon.append(timer)
                self.now_s = max(self.now_s, timer[_WHEN])
        due_s = self.now_s + _RESOLUTION_S
        while timers and timers[0][_WHEN] < due_s:
            soon.append(heappop(timers))

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

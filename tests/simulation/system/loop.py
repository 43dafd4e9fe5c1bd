"""An event loop on virtual time: it never waits, and runs the same calls in the same order each time.

If nothing is ready, time jumps to the next timer; without a timer the loop raises `Deadlock`. Work for
another thread runs in the loop, once the time that it takes is over.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import Context, ContextVar
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")

MOST_TURNS = 400_000
"""Most iterations of the loop in one schedule; with more, it runs for ever without time passing."""


_CLOCKED = (
    "services.target.loop",
    "services.target.servicer",
    "services.draft.loop",
    "services.draft.servicer",
    "services.gateway.servicer",
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
    with ExitStack() as patches:
        patches.enter_context(mock.patch("galley.client.streams.random", random.Random(0)))
        for name in _CLOCKED:
            patches.enter_context(mock.patch(f"{name}.time", _VirtualTime))
        yield


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
        self.tasks: dict[int, SimTask] = {}

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
        for task in list(self.tasks.values()):
            task.cancel()


_CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)


class SimTask(asyncio.Task[Any]):
    """A task of a process, hashed by its number, so that sets of tasks have an order."""

    def __init__(self, coro: Any, number: int, process: Process | None, **options: Any) -> None:
        self.number = number
        self.process = process
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number


class _NoSelector:
    """Replaces waiting for sockets."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[object]:
        self._loop.turn(timeout)
        return []


class SimLoop(asyncio.BaseEventLoop):
    """The loop of one schedule; the module states its rules."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = 0
        self._now_s = 0.0
        self._task_numbers = 0
        self._clock_resolution = 1e-9
        self._selector = _NoSelector(self)
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now_s

    def turn(self, timeout: float | None) -> None:
        self.turns += 1
        if timeout is None:
            raise Deadlock
        if self.turns > MOST_TURNS:
            raise Livelock
        if timeout > 0:
            self._now_s = self._scheduled[0]._when  # type: ignore[attr-defined]

    def run_in_executor(self, _executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        process = _CURRENT.get()
        done: asyncio.Future[T] = self.create_future()
        delay_s = 0.001 if process is None else process.compute_s * process.slow
        frozen_s = 0.0 if process is None else max(0.0, process.frozen_until - self._now_s)
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

    def _make_task(self, _loop: object, coro: Any, context: Context | None = None) -> SimTask:
        process = _CURRENT.get()
        if context is not None:
            context.run(_CURRENT.set, process)
        self._task_numbers += 1
        task = SimTask(coro, self._task_numbers, process, loop=self, context=context)
        if process is not None:
            process.tasks[task.number] = task
            task.add_done_callback(_forget)
            if not process.alive:
                task.cancel()
        return task

    def _process_events(self, event_list: object) -> None:
        """Do nothing: there are no sockets."""

    def _write_to_self(self) -> None:
        """Do nothing: the loop never waits in a selector."""


def _forget(task: SimTask) -> None:
    if task.process is not None:
        task.process.tasks.pop(task.number, None)

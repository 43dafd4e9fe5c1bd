"""Continuous batching: whatever waits when a step begins goes into that step.

The loop lives in the event loop; steps run one at a time on a thread of their own, so that calls are taken
and answered while a model computes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from services.common.status import log_internal
from services.core.errors import Broken, DeadlinePassed, GalleyError, Overloaded, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

J = TypeVar("J")
O = TypeVar("O")  # noqa: E741  # outcome

_RETRY_AFTER_S = 0.5


@dataclass(frozen=True, slots=True)
class Done(Generic[O]):
    """The outcome of one job; `batch` jobs shared its step, which took `compute_ns`."""

    outcome: O
    queue_ns: int
    compute_ns: int
    batch: int


@dataclass(slots=True)
class _Ticket(Generic[J, O]):
    key: Hashable
    job: J
    future: asyncio.Future[Done[O]]
    submitted_ns: int
    deadline_ns: int | None


class Batcher(Generic[J, O]):
    """Runs `step` over all waiting jobs, at most one of a key in a step, in the order in which they came.

    `step` answers each job in order. What a step raises, its jobs get as Unavailable: asking again may help.
    """

    def __init__(self, step: Callable[[Sequence[J]], Sequence[O]], *, max_waiting: int) -> None:
        self._step = step
        self._max_waiting = max_waiting
        self._waiting: deque[_Ticket[J, O]] = deque()
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._loop_task = asyncio.ensure_future(self._run())
        self.draining = asyncio.Event()

    def submit(self, key: Hashable, job: J, remaining_ns: int = 0) -> asyncio.Future[Done[O]]:
        """The future outcome of `job`; cancel it to give the job up. `remaining_ns` 0 is no deadline.

        Raises Overloaded if too many wait, Unavailable once draining. The future raises DeadlinePassed if
        the job has not begun in time.
        """
        if self.draining.is_set():
            raise Unavailable("the replica is draining")
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} items are waiting", _RETRY_AFTER_S)
        now = time.monotonic_ns()
        future: asyncio.Future[Done[O]] = asyncio.get_running_loop().create_future()
        deadline_ns = now + remaining_ns if remaining_ns else None
        self._waiting.append(_Ticket(key, job, future, now, deadline_ns))
        self._idle.clear()
        self._arrived.set()
        return future

    async def drain(self) -> None:
        """Refuse new jobs and wait until all others are answered."""
        self.draining.set()
        await self._idle.wait()

    async def close(self) -> None:
        """End at once; a step under way ends first, jobs that have not begun raise Unavailable."""
        self.draining.set()
        self._loop_task.cancel()
        await asyncio.wait({self._loop_task})
        await asyncio.to_thread(self._worker.shutdown)
        for ticket in self._waiting:
            _fail(ticket, Unavailable("the replica has stopped"))

    async def _run(self) -> None:
        while True:
            batch = await self._receive()
            if batch:
                await self._compute(batch)

    async def _receive(self) -> list[_Ticket[J, O]]:
        """All that wait, but for the given up, the late, and all but the first of a key."""
        if not self._waiting:
            self._idle.set()
            await self._arrived.wait()
        self._arrived.clear()
        now = time.monotonic_ns()
        batch: dict[Hashable, _Ticket[J, O]] = {}
        later: deque[_Ticket[J, O]] = deque()
        for ticket in self._waiting:
            if ticket.future.done():
                continue
            if ticket.deadline_ns is not None and ticket.deadline_ns <= now:
                _fail(ticket, DeadlinePassed("the deadline passed before the work began"))
            elif ticket.key in batch:
                later.append(ticket)
            else:
                batch[ticket.key] = ticket
        self._waiting = later
        return list(batch.values())

    async def _compute(self, batch: list[_Ticket[J, O]]) -> None:
        begun = time.monotonic_ns()
        jobs = [ticket.job for ticket in batch]
        try:
            outcomes = await asyncio.get_running_loop().run_in_executor(self._worker, self._step, jobs)
            if len(outcomes) != len(jobs):
                raise Broken(f"a step of {len(jobs)} jobs had {len(outcomes)} outcomes")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001  # one step must not end the loop
            log_internal(error)
            for ticket in batch:
                _fail(ticket, error if isinstance(error, GalleyError) else Unavailable("the step failed"))
            return
        except asyncio.CancelledError:
            for ticket in batch:
                _fail(ticket, Unavailable("the replica has stopped"))
            raise
        compute_ns = time.monotonic_ns() - begun
        for ticket, outcome in zip(batch, outcomes, strict=True):
            if not ticket.future.done():
                queue_ns = begun - ticket.submitted_ns
                ticket.future.set_result(Done(outcome, queue_ns, compute_ns, len(batch)))


def _fail(ticket: _Ticket[J, O], error: GalleyError) -> None:
    if not ticket.future.done():
        ticket.future.set_exception(error)

"""Run the loop of a draft replica: receive, open, step, deliver; one thread computes.

Requests join at the next step and get a response as soon as they are finished. At its deadline a request
gets the tokens of the last step as its response, even while another step runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count

from galley.common.logs import log_internal
from galley.common.metrics import catalogue
from galley.common.metrics.labels import PROPOSED
from galley.common.metrics.registry import Registry
from galley.common.tracing.item_spans import LINK_ITEM
from galley.common.tracing.light_spans import LightSpan, SpanScope
from galley.core import names
from galley.core.errors import DeadlinePassed, GalleyError, Overloaded, Unavailable
from services.draft.drafter import Done, Drafter, Proposed, ProposeJob, ProposeOutcome, Stepped

MAX_WAITING = 1024
_RETRY_AFTER_S = 0.5
_SECOND = 1e9


class BatchSpans:
    """The span of the current steps, until requests arrive or none are left."""

    def __init__(self, spans: SpanScope | None) -> None:
        self._spans = spans
        # The spans of the requests that took part, in order of arrival.
        self._items: dict[LightSpan, None] = {}
        self._began_ns = self._ended_ns = 0
        self._steps = 0
        self._sessions = 0

    def stepped(self, items: Sequence[LightSpan], took_ns: int, sessions: int, steps: int) -> None:
        """Add `steps` of `sessions` sessions that ended now; `items` are the traced requests."""
        self._ended_ns = time.time_ns()
        if not self._items:
            self._began_ns = self._ended_ns - took_ns
        self._items.update(dict.fromkeys(items))
        self._steps += steps
        self._sessions = max(self._sessions, sessions)

    def end(self) -> None:
        if self._spans is None or not self._items:
            return
        # Nothing refers to it, so it is created at its end. It has several callers, so it has its own trace.
        span = self._spans.root(names.DRAFT_BATCH, self._began_ns)
        span.attributes |= {names.BATCH_SESSIONS: self._sessions, names.BATCH_STEPS: self._steps}
        span.link_to(self._items, LINK_ITEM)
        span.end(self._ended_ns)
        self._items = {}
        self._steps = self._sessions = 0


class DraftMeter:
    """Count in a registry, which reads `queue_depth` and the drafter's counts when it is scraped."""

    def __init__(self, registry: Registry, queue_depth: Callable[[], int], drafter: Drafter) -> None:
        """Register each outcome of the drafter's strategies, so that it is shown as 0 from the start."""
        self._age = registry.distribute(catalogue.DRAFT_QUEUE_AGE).at()
        self._sessions = registry.distribute(catalogue.DRAFT_BATCH_SESSIONS).at()
        self._duration = registry.distribute(catalogue.DRAFT_STEP_DURATION).at()
        self._proposals = registry.count(catalogue.DRAFT_PROPOSALS)
        registry.observe(catalogue.DRAFT_QUEUE_DEPTH, lambda: [((), queue_depth())])
        registry.observe(catalogue.WASTED_DRAFT_TOKENS, lambda: [(("cancelled",), drafter.wasted)])
        for strategy in drafter.strategies:
            for outcome in PROPOSED.values:
                self._proposals.at(strategy, outcome)

    def began(self, waits_ns: Iterable[int]) -> None:
        """Count requests that started, with their queue times."""
        for wait_ns in waits_ns:
            self._age.observe(wait_ns / _SECOND)

    def stepped(self, sessions: int, took_ns: int) -> None:
        """Count a step, if it had sessions. Called on the worker thread."""
        if sessions:
            self._sessions.observe(sessions)
            self._duration.observe(took_ns / _SECOND)

    def ended(self, strategy: str, outcome: str) -> None:
        """Count a request that ended with one of the outcomes of the catalogue."""
        self._proposals.at(strategy, outcome).value += 1


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request until its response: `ready` is its proposal so far, `used` the size of an early response."""

    job: ProposeJob
    future: asyncio.Future[Done]
    submitted_ns: int
    span: LightSpan | None
    started: bool = False
    late: bool = False
    ready: Proposed | None = None
    used: int = 0
    compute_ns: int = 0
    session_ns: int = 0

    def expire(self) -> None:
        """Respond at the deadline with what is ready, or later if the request is being opened."""
        self.late = True
        if self.future.done():
            return
        if self.ready is not None:
            self.used = len(self.ready.draft_tokens)
            self.answer(self.ready)
        elif not self.started:
            self.fail(DeadlinePassed("the deadline passed before the work began"))

    def answer(self, outcome: ProposeOutcome) -> None:
        if not self.future.done():
            queue_ns = max(0, time.monotonic_ns() - self.submitted_ns - self.compute_ns)
            sessions = max(1, round(self.session_ns / max(1, self.compute_ns)))
            self.future.set_result(Done(outcome, queue_ns, self.compute_ns, sessions))

    def fail(self, error: GalleyError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class DraftLoop:
    """Run steps while there is work; create it within the running event loop."""

    def __init__(
        self,
        drafter: Drafter,
        spans: SpanScope | None,
        *,
        max_waiting: int,
        metrics: Registry | None = None,
    ) -> None:
        self.meter = None if metrics is None else DraftMeter(metrics, lambda: self.queue_depth, drafter)
        self._drafter = drafter
        self._batches = BatchSpans(spans)
        self._max_waiting = max_waiting
        self._numbers = count()
        self._new: dict[int, _Ticket] = {}
        self._open: dict[int, _Ticket] = {}
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._task = asyncio.ensure_future(self._run())
        self.draining = asyncio.Event()

    @property
    def queue_depth(self) -> int:
        return len(self._new) + len(self._open)

    def submit(
        self, job: ProposeJob, remaining_ns: int = 0, span: LightSpan | None = None
    ) -> asyncio.Future[Done]:
        """Return the future outcome of `job`; cancel it to cancel the job. `remaining_ns` 0 is no deadline.

        Raise Overloaded if `max_waiting` requests wait or run, Unavailable once draining. The future raises
        DeadlinePassed if the job has not started in time.
        """
        if self.draining.is_set():
            raise Unavailable("the replica is draining")
        if self.queue_depth >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests are waiting or running", _RETRY_AFTER_S)
        loop, item = asyncio.get_running_loop(), next(self._numbers)
        ticket = _Ticket(job, loop.create_future(), time.monotonic_ns(), span)
        timer = loop.call_later(remaining_ns / 1e9, ticket.expire) if remaining_ns else None
        ticket.future.add_done_callback(lambda _: self._ended(item, timer))
        self._new[item] = ticket
        self._idle.clear()
        self._changed.set()
        return ticket.future

    async def drain(self) -> None:
        """Refuse new requests and wait until all others have ended."""
        self.draining.set()
        await self._idle.wait()

    async def close(self) -> None:
        """End after the current step; open requests raise Unavailable."""
        self.draining.set()
        self._task.cancel()
        await asyncio.wait({self._task})
        self._changed.set()
        await asyncio.to_thread(self._worker.shutdown)
        for ticket in (*self._new.values(), *self._open.values()):
            ticket.fail(Unavailable("the replica has stopped"))
        self._batches.end()
        self._idle.set()

    def _ended(self, item: int, timer: asyncio.TimerHandle | None) -> None:
        """Continue the steps without a request that got an early response or was cancelled."""
        if timer is not None:
            timer.cancel()
        if item in self._open:
            self._changed.set()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            ended, new = self._receive()
            if new or not self._open:
                self._batches.end()
            if ended or new:
                await self._compute(partial(self._open_items, new, ended))
            elif self._open:
                await self._compute(self._advance)
            else:
                self._idle.set()
                await self._changed.wait()

    def _receive(self) -> tuple[dict[int, int], dict[int, ProposeJob]]:
        """Return the requests that ended since the last step, with their used tokens, and the new ones."""
        ended = {item: ticket.used for item, ticket in self._open.items() if ticket.future.done()}
        for item in ended:
            del self._open[item]
        arrived = {item: ticket for item, ticket in self._new.items() if not ticket.future.done()}
        self._new.clear()
        self._open |= arrived
        now = time.monotonic_ns()
        if self.meter is not None:
            self.meter.began(now - ticket.submitted_ns for ticket in arrived.values())
        for ticket in arrived.values():
            ticket.started = True
        return ended, {item: ticket.job for item, ticket in arrived.items()}

    async def _compute(self, work: Callable[[], Stepped]) -> None:
        try:
            stepped = await asyncio.get_running_loop().run_in_executor(self._worker, work)
        except Exception as error:  # noqa: BLE001  # one step must not end the loop
            log_internal(error)
            # They count as ended, so the drafter drops them next.
            for ticket in self._open.values():
                ticket.fail(Unavailable("the step failed"))
        else:
            self._deliver(stepped)

    def _open_items(self, new: Mapping[int, ProposeJob], ended: Mapping[int, int]) -> Stepped:
        """Open and close requests; runs on the worker thread."""
        began_ns = time.monotonic_ns()
        stepped = self._drafter.open(new, ended)
        self._record(stepped, time.monotonic_ns() - began_ns)
        return stepped

    def _advance(self) -> Stepped:
        """Step until there is something to deliver or to receive; runs on the worker thread."""
        while True:
            began_ns = time.monotonic_ns()
            stepped = self._drafter.advance()
            self._record(stepped, time.monotonic_ns() - began_ns, steps=1)
            if stepped.answers or self._changed.is_set():
                return stepped

    def _record(self, stepped: Stepped, took_ns: int, steps: int = 0) -> None:
        """Keep the partial proposals for deadlines; runs on the worker thread while no ticket changes."""
        sessions = len(stepped.answers) + len(stepped.so_far)
        if self.meter is not None:
            self.meter.stepped(sessions, took_ns)
        traced: list[LightSpan] = []
        for item in (*stepped.answers, *stepped.so_far):
            ticket = self._open[item]
            ticket.compute_ns += took_ns
            ticket.session_ns += took_ns * sessions
            if ticket.span is not None:
                traced.append(ticket.span)
        if traced:
            self._batches.stepped(traced, took_ns, sessions, steps)
        for item, ready in stepped.so_far.items():
            self._open[item].ready = ready

    def _deliver(self, stepped: Stepped) -> None:
        for item, outcome in stepped.answers.items():
            ticket = self._open.pop(item)
            if ticket.future.done() and isinstance(outcome, Proposed):
                self._drafter.wasted += len(outcome.draft_tokens) - ticket.used
            ticket.answer(outcome)
        for item in stepped.so_far:
            if self._open[item].late:
                self._open[item].expire()

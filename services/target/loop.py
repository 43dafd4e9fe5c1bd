"""The step loop of a target replica: plan, run, conclude, deliver.

The scheduler decides, on the event loop only. The engine computes, on a thread of its own, so that requests
are admitted and get responses while a step runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from opentelemetry.trace import INVALID_SPAN, use_span

from galley.common.logs import get_logger, log_internal
from galley.common.metrics import catalogue
from galley.common.metrics.registry import Registry
from galley.common.tracing.light_spans import LightSpan, SpanScope
from galley.core.errors import GalleyError, Unavailable
from galley.core.scheduler.memory import KvMemory
from galley.core.scheduler.messages import BatchInfo, Confirmed, Extend, Response, VerifyRequest
from galley.core.scheduler.scheduler import Linger
from galley.core.step import StepOutcome, StepPlan
from services.target.engine.protocol import EngineLost, TargetEngine
from services.target.spans import Batch, BatchSpans

_log = get_logger(__name__)

_SECOND = 1e9
LONGEST_STEP_S = 120.0
"""A step that takes longer hangs: its replica can serve nothing, and must not keep its lease."""
_LOOKS = 12
"""Looks at a step in that time. While the whole process is stopped, at most one of them passes."""


class StepMeter:
    """Count steps in a registry, which reads the engine's own counts when scraped."""

    def __init__(self, registry: Registry, engine: TargetEngine) -> None:
        self._sessions = registry.distribute(catalogue.BATCH_SESSIONS).at()
        self._rows = registry.distribute(catalogue.BATCH_ROWS).at()
        self._tokens = registry.distribute(catalogue.BATCH_TOKENS).at()
        self._duration = registry.distribute(catalogue.BATCH_DURATION).at()
        self._age = registry.distribute(catalogue.QUEUE_AGE).at()
        self._prefill_rows = registry.count(catalogue.BATCH_PREFILL_ROWS).at()
        self._draft_rows = registry.count(catalogue.BATCH_DRAFT_ROWS).at()
        counts, kv = engine.counts, engine.kv
        registry.observe(catalogue.LINGER, lambda: [((), counts.linger_ns / _SECOND)])
        registry.observe(catalogue.MASK_WAIT, lambda: [((), counts.mask_wait_ns / _SECOND)])
        registry.observe(catalogue.QUEUE_DEPTH, lambda: [((), engine.queue_depth)])
        registry.observe(catalogue.KV_BLOCKS, lambda: _blocks(kv))
        registry.observe(catalogue.KV_PROMPT_TOKENS, lambda: [((), counts.prompt_tokens)])
        registry.observe(catalogue.KV_REUSED_TOKENS, lambda: [((), counts.reused_tokens)])
        registry.observe(catalogue.KV_MISSES, lambda: [((), counts.missed)])
        registry.observe(catalogue.PREEMPTIONS, lambda: [((), counts.preempted)])
        registry.observe(catalogue.EVICTIONS, lambda: [((), kv.evicted_blocks)])
        registry.observe(catalogue.OUT_OF_BLOCKS, lambda: [((), counts.out_of_blocks)])

    def count(
        self, batch: BatchInfo, duration_ns: int, confirmed: int, queue_times_ns: Sequence[int]
    ) -> None:
        """Count a step; `queue_times_ns` are those of the requests that started in it."""
        self._sessions.observe(len(batch.request_ids))
        self._rows.observe(batch.rows)
        self._tokens.observe(confirmed)
        self._duration.observe(duration_ns / _SECOND)
        self._draft_rows.value += batch.draft_rows
        self._prefill_rows.value += batch.prefill_rows
        for queue_time_ns in queue_times_ns:
            self._age.observe(queue_time_ns / _SECOND)


def _blocks(kv: KvMemory) -> list[tuple[tuple[str], float]]:
    used, free = kv.live_blocks, kv.empty
    return [(("used",), used), (("cached",), kv.total - used - free), (("free",), free)]


class Ticket:
    def __init__(self, item: int) -> None:
        self.item = item
        self._responses: deque[Response] = deque()
        self._ready = asyncio.Event()
        self.ended = False

    async def next(self) -> Response:
        """Return the next response; call it until `ended`."""
        while not self._responses:
            self._ready.clear()
            await self._ready.wait()
        response = self._responses.popleft()
        self.ended = response.is_last
        return response

    def put(self, response: Response) -> None:
        self._responses.append(response)
        self._ready.set()


class OpenRequest:
    """A request of a stream. Until it is read and its grammar compiled, extensions wait for its ticket."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop = loop
        self._ticket: Ticket | None = None
        self._waiting: Extend | GalleyError | None = None

    def begin(self, ticket: Ticket) -> None:
        self._ticket = ticket
        if self._waiting is not None:
            self.extend(self._waiting)

    def extend(self, extension: Extend | GalleyError) -> None:
        """Extend the request, or end it with the error of an invalid extension."""
        if self._ticket is None:
            self._wait(extension)
        elif isinstance(extension, Extend):
            self._loop.extend(self._ticket, extension)
        else:
            self._loop.refuse(self._ticket, extension)

    def _wait(self, extension: Extend | GalleyError) -> None:
        if isinstance(self._waiting, Extend) and isinstance(extension, Extend):
            extension = self._waiting.then(extension)
        if not isinstance(self._waiting, GalleyError):
            self._waiting = extension


class StepLoop:
    """Run steps while there is work; create it within the running event loop."""

    def __init__(self, engine: TargetEngine, spans: SpanScope | None, meter: StepMeter | None = None) -> None:
        self._engine = engine
        self._batches = BatchSpans(spans)
        self._meter = meter
        self._tickets: dict[int, Ticket] = {}
        self._changed = asyncio.Event()
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopped: Unavailable | None = None
        self._next_look: asyncio.TimerHandle
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="step")
        self._task = asyncio.ensure_future(self._run())
        self.draining = asyncio.Event()
        self.on_loss: Callable[[], None] = lambda: None
        """Is called when the engine is lost, after each step that it fails, and while a step hangs."""

    def submit(self, request: VerifyRequest, span: LightSpan | None = None) -> Ticket:
        """Queue `request` and return the ticket for its responses; `span` is the request's, if it is traced.

        Raise Unavailable while draining, Overloaded if too many requests wait, InvalidField if the pool can
        never hold it.
        """
        if self._stopped is not None:
            raise self._stopped
        if self.draining.is_set():
            raise Unavailable("the replica is draining")
        ticket = Ticket(self._engine.submit(request, time.monotonic_ns()))
        self._tickets[ticket.item] = ticket
        self._batches.joins(ticket.item, span)
        self._idle.clear()
        self._arrived.set()
        self._deliver()
        self._changed.set()
        return ticket

    def extend(self, ticket: Ticket, extension: Extend) -> None:
        """Add credit or a hint; ignored if the request has ended."""
        self._engine.extend(ticket.item, extension, time.monotonic_ns())
        self._changed.set()

    def refuse(self, ticket: Ticket, error: GalleyError) -> None:
        if ticket.item in self._tickets:
            self.cancel(ticket)
            ticket.put(Response(ticket.item, error))

    def cancel(self, ticket: Ticket) -> None:
        if self._tickets.pop(ticket.item, None) is not None:
            self._batches.leaves(ticket.item)
            self._engine.cancel(ticket.item)
            self._changed.set()

    async def quiet(self, quiet_s: float) -> None:
        """Return once no request was open for `quiet_s`: a session's next one follows soon after its last."""
        while True:
            await self._idle.wait()
            self._arrived.clear()
            try:
                async with asyncio.timeout(quiet_s):
                    await self._arrived.wait()
            except TimeoutError:
                # One may have arrived between the two waits.
                if self._idle.is_set():
                    return

    async def drain(self) -> None:
        """Refuse new requests; open ones end with their next result."""
        self.draining.set()
        self._engine.drain()
        self._changed.set()
        await self._idle.wait()

    async def close(self) -> None:
        """Stop after the running step; open requests get Unavailable."""
        self.draining.set()
        self._task.cancel()
        await asyncio.wait({self._task})
        await asyncio.to_thread(self._worker.shutdown)
        self._stop(Unavailable("the replica has stopped"))

    async def _run(self) -> None:
        while True:
            try:
                await self._step_once()
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001  # after a fault or a native panic no caller may hang
                log_internal(error)
                self._engine.abandon(Unavailable("the replica's scheduler has failed"))
                self._deliver()

    async def _step_once(self) -> None:
        self._changed.clear()
        now = time.monotonic_ns()
        self._engine.expire(now)
        step = self._engine.plan(now)
        self._deliver()
        if isinstance(step, StepPlan):
            await self._run_plan(step)
        else:
            await self._wait(step)

    async def _wait(self, step: Linger | None) -> None:
        if step is None:
            if not self._tickets:
                self._idle.set()
            await self._changed.wait()
            return
        timer = asyncio.get_running_loop().call_later(
            max(0, step.until_ns - time.monotonic_ns()) / 1e9, self._changed.set
        )
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    async def _run_plan(self, plan: StepPlan) -> None:
        batch = self._batches.begin(self._engine)
        try:
            done, queue_times_ns = await self._run_step(plan, batch), self._engine.queue_times_ns
            confirmed = self._deliver()
            if done is not None and self._meter is not None:
                self._meter.count(*done, confirmed, queue_times_ns)
        finally:
            if batch is not None:
                batch.end()

    async def _run_step(self, plan: StepPlan, batch: Batch | None) -> tuple[BatchInfo, int] | None:
        """Return what the step was, and how long it took, in ns; None if it failed."""
        loop, began_ns = asyncio.get_running_loop(), time.monotonic_ns()
        running = loop.run_in_executor(self._worker, self._compute, plan, batch)
        self._look_after(_LOOKS)
        running.add_done_callback(lambda _: self._next_look.cancel())
        try:
            outcomes = await asyncio.shield(running)  # after `close`, too, a step that hangs is noticed
        except Exception as error:  # noqa: BLE001  # a failed step must not end the loop
            failed = Unavailable("the step failed")
            with use_span(batch.failed(failed) if batch is not None else INVALID_SPAN):
                log_internal(error)
            self._engine.fail(plan, failed)
            if isinstance(error, EngineLost):
                self.on_loss()
            return None
        now = time.monotonic_ns()
        info = self._engine.conclude(plan, outcomes, now, batch.packed if batch is not None else b"")
        if batch is not None:
            batch.concluded(info)
        return info, now - began_ns

    def _look_after(self, looks: int) -> None:
        """Report the running step as hanging after that many looks, one after the other."""
        if looks:
            loop = asyncio.get_running_loop()
            self._next_look = loop.call_later(LONGEST_STEP_S / _LOOKS, self._look_after, looks - 1)
        else:
            _log.error("step hangs", seconds=LONGEST_STEP_S)
            self.on_loss()

    def _compute(self, plan: StepPlan, batch: Batch | None) -> Sequence[StepOutcome]:
        if batch is None:
            return self._engine.run(plan)
        outcomes = self._engine.run(plan, batch.watch)
        batch.ran()
        return outcomes

    def _deliver(self) -> int:
        """Deliver the responses; return how many tokens they confirm."""
        confirmed = 0
        for response in self._engine.take_responses():
            if isinstance(response.outcome, Confirmed):
                confirmed += len(response.outcome.tokens)
            ticket = self._tickets.get(response.request_id)
            if ticket is None:
                continue
            if response.is_last:
                del self._tickets[response.request_id]
                self._batches.leaves(response.request_id)
            ticket.put(response)
        return confirmed

    def _stop(self, error: Unavailable) -> None:
        self._stopped = error
        for ticket in self._tickets.values():
            ticket.put(Response(ticket.item, error))
        self._tickets.clear()
        self._idle.set()

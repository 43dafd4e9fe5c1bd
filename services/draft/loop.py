"""Run the loop of a draft replica: receive, open, step, deliver; one thread computes.

Requests join at the next step and get a response as soon as they are finished. A session has at most one
open request: a newer one supersedes it. If more are open than fit into a step, the oldest go first. At its
deadline a request gets the tokens of the last step as its response, even while another step runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol, TypeAlias

from galley.common.logs import log_internal
from galley.common.metrics.registry import Registry
from galley.common.tracing.light_spans import LightSpan, SpanScope
from galley.core.content import Miss, SessionKey, look_up
from galley.core.errors import Broken, DeadlinePassed, GalleyError, Overloaded, Unavailable
from galley.core.features import NO_STATES, States
from galley.core.grammar.compiled import CompiledGrammar
from galley.core.scheduler.messages import Slice, Superseded
from galley.core.trees import CHAIN, Parents, simplified
from services.draft.sessions import SessionTable
from services.draft.strategies.base import DraftJob, DraftSession, Proposal, Strategy
from services.draft.telemetry import BatchSpans, DraftMeter

MAX_WAITING = 1024
_RETRY_AFTER_S = 0.5


@dataclass(frozen=True, slots=True)
class ProposeJob:
    """A validated request for at most `k` tokens; the last `ahead` tokens of the slice are not confirmed.

    `states` are the target's of confirmed tokens.
    """

    slice: Slice
    k: int
    strategy: str
    ahead: int = 0
    workload: str = ""
    grammar: CompiledGrammar | None = None
    width: int = 1
    states: States = NO_STATES


@dataclass(frozen=True, slots=True)
class Proposed:
    """Draft tokens from `position` on, after a prefix of this hash: a chain, or a tree with `parents`."""

    position: int
    prefix_hash: bytes
    draft_tokens: tuple[int, ...]
    survival: tuple[float, ...]
    kv_len: int
    # The source of each token; empty: the strategy's own.
    sources: tuple[str, ...] = ()
    parents: Parents = CHAIN
    used_features: bool = False


# An error concerns its own request only.
ProposeOutcome: TypeAlias = "Proposed | Miss | Superseded | GalleyError"


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of a request; `sessions` is the mean number in its steps, weighted by time."""

    outcome: ProposeOutcome
    queue_ns: int
    compute_ns: int
    sessions: int = 1


class Background(Protocol):
    """Work for the worker between steps, about a millisecond at a time."""

    @property
    def has_work(self) -> bool: ...

    def work(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Request:
    """A request until its response. `hash` is that of the tokens before its proposal.

    It ends with the `strategy` that it was opened with. The worker sets `ready`, the proposal so far, after
    each step, and `outcome` at the end. `used` is the size of an early response.
    """

    job: ProposeJob
    future: asyncio.Future[Done]
    submitted_ns: int
    span: LightSpan | None
    hash: bytes = b""
    strategy: Strategy | None = None
    ready: Proposed | None = None
    outcome: ProposeOutcome | None = None
    started: bool = False
    late: bool = False
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
    """Keep the tokens of sessions and run strategies on them while there is work."""

    def __init__(
        self,
        strategies: Mapping[str, Strategy],
        *,
        max_sessions: int,
        max_tokens: int,
        max_batch: int,
        max_waiting: int = MAX_WAITING,
        spans: SpanScope | None = None,
        metrics: Registry | None = None,
    ) -> None:
        """Advance at most `max_batch` proposals a step. Create it within the running event loop."""
        self.background: Background | None = None
        # Tokens drafted for ended requests; those wasted were in no response.
        self.drafted = self.wasted = 0
        self.meter: DraftMeter | None = None
        if metrics is not None:
            self.meter = DraftMeter(metrics, strategies, lambda: self.queue_depth, lambda: self.wasted)
        self._strategies = strategies
        self._sessions = SessionTable(max_sessions, max_tokens)
        self._batches = BatchSpans(spans)
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._new: list[_Request] = []
        # The oldest first; changed only while the worker is idle.
        self._open: list[_Request] = []
        # The worker's: the proposals of the open requests, the oldest first.
        self._proposals: dict[_Request, Proposal] = {}
        self._by_session: dict[SessionKey, _Request] = {}
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
        loop = asyncio.get_running_loop()
        request = _Request(job, loop.create_future(), time.monotonic_ns(), span)
        timer = loop.call_later(remaining_ns / 1e9, request.expire) if remaining_ns else None
        request.future.add_done_callback(lambda _: self._ended(request, timer))
        self._new.append(request)
        self._idle.clear()
        self._changed.set()
        return request.future

    def exchange(self, strategies: Mapping[str, Strategy]) -> None:
        """Have the requests that are opened from now on use `strategies` in place of those of their names."""
        self._strategies = {**self._strategies, **strategies}

    def wake(self) -> None:
        """Look for work in the background now."""
        self._changed.set()

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
        for request in (*self._new, *self._open):
            request.fail(Unavailable("the replica has stopped"))
        self._batches.end()
        self._idle.set()

    def _ended(self, request: _Request, timer: asyncio.TimerHandle | None) -> None:
        """Continue the steps without a request that got an early response or was cancelled."""
        if timer is not None:
            timer.cancel()
        if request.outcome is None:
            self._changed.set()

    # ------------------------------------------------------------------------- on the event loop --

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            ended, new = self._receive()
            if new or not self._open:
                self._batches.end()
            if ended or new:
                await self._compute(partial(self._open_requests, new, ended))
            elif self._open:
                await self._compute(self._advance)
            else:
                self._idle.set()
                if self.background is None or not self.background.has_work:
                    await self._changed.wait()
            await self._work_in_background()

    def _receive(self) -> tuple[list[_Request], list[_Request]]:
        """Return the requests that ended since the last step, and the new ones."""
        ended = [request for request in self._open if request.future.done()]
        new = [request for request in self._new if not request.future.done()]
        self._open = [request for request in self._open if not request.future.done()] + new
        self._new.clear()
        now = time.monotonic_ns()
        if self.meter is not None:
            self.meter.began(now - request.submitted_ns for request in new)
        for request in new:
            request.started = True
        return ended, new

    async def _compute(self, work: Callable[[], None]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._worker, work)
        except Exception as error:  # noqa: BLE001  # one step must not end the loop
            log_internal(error)
            # They count as ended, so they are closed next.
            for request in self._open:
                request.fail(Unavailable("the step failed"))
        else:
            self._deliver()

    async def _work_in_background(self) -> None:
        if self.background is None or not self.background.has_work:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._worker, self.background.work)
        except Exception as error:  # noqa: BLE001  # requests do not depend on it
            log_internal(error)

    def _deliver(self) -> None:
        stepped, self._open = self._open, [request for request in self._open if request.outcome is None]
        for request in stepped:
            if (outcome := request.outcome) is not None:
                if request.future.done() and isinstance(outcome, Proposed):
                    self.wasted += len(outcome.draft_tokens) - request.used
                request.answer(outcome)
            elif request.late:
                request.expire()

    # ----------------------------------------------------------------------------- on the worker --

    def _open_requests(self, new: Sequence[_Request], ended: Sequence[_Request]) -> None:
        """Close the requests that ended, open the new ones and start their proposals."""
        began_ns = time.monotonic_ns()
        for request in ended:
            if request in self._proposals:
                self._close(request, request.used)
        superseded = [before for request in new if (before := self._admit(request)) is not None]
        self._step([request for request in new if request in self._proposals], self._begin)
        self._record(dict.fromkeys([*superseded, *new]), time.monotonic_ns() - began_ns)

    def _advance(self) -> None:
        """Step until there is something to deliver or to receive."""
        taking = list(islice(self._proposals, self._max_batch))
        while True:
            began_ns = time.monotonic_ns()
            self._step(taking, self._continue)
            self._record(taking, time.monotonic_ns() - began_ns, steps=1)
            if self._changed.is_set() or any(request.outcome is not None for request in taking):
                return

    def _admit(self, request: _Request) -> _Request | None:
        """Open the request, or set why it cannot be opened; return the request that it supersedes."""
        job, sent = request.job, request.job.slice
        if (before := self._by_session.get(sent.key)) is not None:
            before.outcome = Superseded(before.job.slice.position, before.hash)
            self._close(before)
        session = self._sessions.peek(sent.key) or DraftSession()
        known = look_up(session.tokens, sent.start, sent.tokens, sent.prefix_hash, session.prefix)
        if isinstance(known, Miss):
            request.outcome = known
            return before
        # The target decides the last position alone.
        k = min(job.k, sent.max_position - sent.position - 1)
        try:
            session = self._sessions.admit(sent.key, sent.position + k, self._by_session)
        except GalleyError as overloaded:
            request.outcome = overloaded
            return before
        session.follow(sent, job.ahead)
        session.states = session.states.joined(job.states)
        request.hash = session.prefix.digest(session.tokens, len(session.tokens))
        request.strategy = self._strategies[job.strategy]
        self._proposals[request] = Proposal(DraftJob(sent, session, k, job.workload, job.grammar, job.width))
        self._by_session[sent.key] = request
        return before

    def _step(
        self, requests: Sequence[_Request], work: Callable[[Strategy, Sequence[_Request]], None]
    ) -> None:
        """Run `work` by strategy, and conclude; a failure concerns the requests of its strategy only."""
        by_strategy: dict[Strategy, list[_Request]] = defaultdict(list)
        for request in requests:
            if request.strategy is not None:
                by_strategy[request.strategy].append(request)
        for strategy, mine in by_strategy.items():
            name = mine[0].job.strategy
            try:
                work(strategy, mine)
            except BaseException as error:  # noqa: BLE001  # a strategy is a plug-in: whatever it does stays here
                log_internal(error, strategy=name)
                for request in mine:
                    failure = error if isinstance(error, GalleyError) else Broken(f"{name} failed")
                    self._proposals[request].error = failure
        for request in requests:
            self._conclude(request)

    def _begin(self, strategy: Strategy, mine: Sequence[_Request]) -> None:
        proposals = strategy.begin([self._proposals[request].job for request in mine])
        self._proposals.update(zip(mine, proposals, strict=True))

    def _continue(self, strategy: Strategy, mine: Sequence[_Request]) -> None:
        strategy.advance([self._proposals[request] for request in mine])

    def _conclude(self, request: _Request) -> None:
        """Set what the proposal has so far: the outcome if it has ended, else what is ready."""
        proposal, position = self._proposals[request], request.job.slice.position
        k = proposal.job.k
        tokens, survival = tuple(proposal.tokens[:k]), tuple(proposal.survival[:k])
        sources, parents = tuple(proposal.sources[: len(tokens)]), simplified(proposal.parents[: len(tokens)])
        used = proposal.used_features
        so_far = Proposed(position, request.hash, tokens, survival, position, sources, parents, used)
        if proposal.error is not None:
            request.outcome = proposal.error
            self._close(request)
        elif proposal.done:
            request.outcome = so_far
            self._close(request, len(tokens))
        else:
            request.ready = so_far

    def _close(self, request: _Request, used: int = 0) -> None:
        """Close the request; `used` of its tokens were in its response."""
        drafted = len(self._proposals.pop(request).tokens)
        if self._by_session.get(request.job.slice.key) is request:
            del self._by_session[request.job.slice.key]
        self.drafted += drafted
        self.wasted += max(0, drafted - used)

    def _record(self, stepped: Collection[_Request], took_ns: int, steps: int = 0) -> None:
        """Count the time of a step, or of an opening with `steps` 0, for each request that was in it."""
        if self.meter is not None:
            self.meter.stepped(len(stepped), took_ns)
        for request in stepped:
            request.compute_ns += took_ns
            request.session_ns += took_ns * len(stepped)
        traced = [request.span for request in stepped if request.span is not None]
        if traced:
            self._batches.stepped(traced, took_ns, len(stepped), steps)

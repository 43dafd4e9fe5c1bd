"""The shell around the session machine: it executes the effects and reports their outcomes as events.

One runner serves one stream. The machine decides what to do next, and the ports know how to do it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Final

from galley.common.logs import get_logger
from galley.core.errors import Broken, Cancelled, ClientStalled, DeadlinePassed
from galley.core.session import events as ev
from galley.core.session.events import Clock, DraftPort, Replica, RoundEnded, TargetPort, Verification
from galley.core.session.machine import Session
from galley.core.store import UNCHANGED, CacheLocation, KvDirectory
from services.gateway.clock import SECOND, Timeouts
from services.gateway.session.outbox import Outbox
from services.gateway.session.tally import SessionTally
from services.gateway.store.session_log import SessionLog
from services.gateway.telemetry.observer import request_observer

_SEND_GRACE_S = 5.0
"""Longest time that a stream that ends with an error waits for its client to read the confirmed tokens."""

_DRAFT_SHARE = 0.8
"""Share of the draft timeout that the draft gets as the deadline of its proposal."""

_DIRECTORY_TOKENS = 64
"""Tokens after which a commit says anew how much of the session its replicas cache. That costs the store a
part of each commit, and counts only where a session resumes."""

_REPORTS_A_BUFFER = 8
"""The machine learns what the client was sent in parts of its buffer: each report is a step of its own."""

_CARRY_OUT: Final[Mapping[type[ev.Effect], str]] = {
    ev.Commit: "_commit",
    ev.Emit: "_emit",
    RoundEnded: "_report_round",
    ev.Verify: "_verify",
    ev.ExtendVerify: "_extend",
    ev.CancelVerify: "_cancel",
    ev.Propose: "_start_proposal",
    ev.CancelPropose: "_cancel_proposal",
    ev.StoreFinish: "_store_finish",
    ev.SetTimer: "_set_timer",
    ev.End: "_finish",
}
"""The method that carries out each effect; the machine has at most one request at each pool."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    draft: DraftPort
    target: TargetPort
    clock: Clock
    tally: SessionTally | None = None


class SessionRunner:
    def __init__(
        self,
        session: Session,
        log: SessionLog,
        ports: Ports,
        timeouts: Timeouts,
        deadline_ns: int | None,
    ) -> None:
        """`deadline_ns` is in the time of the clock port; None means no deadline."""
        self.session = session
        self.log = log
        self.on_finished: Callable[[], None] = lambda: None
        """Called once the store has the ending, if this runner stored it."""
        self._inbox: list[ev.Event] = []
        self._is_stepping = True
        """True while the machine handles events, and before the session runs."""
        self._ended: asyncio.Future[ev.End] = asyncio.get_running_loop().create_future()
        self._context = Context()
        report_tokens = max(1, session.limits.buffer // _REPORTS_A_BUFFER)
        self.outbox = Outbox(ports.clock, timeouts.client_ns, session.answer.chunks, self.post, report_tokens)
        self._ports = ports
        self._timeouts = timeouts
        self._deadline_ns = deadline_ns
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._observer = request_observer()
        self._renewal: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._verification: Verification | None = None
        self._requested: ev.Verify | None = None
        """The request of the verification, while it is open."""
        self._late_s = 0.0
        """When the next response is late, in the loop's time."""
        self._timer: asyncio.TimerHandle | None = None
        self._proposing: asyncio.Task[None] | None = None
        self._holder: Replica | None = None
        self._named: tuple[Replica | None, Replica | None] = (None, None)
        """The replicas that the store's KV directory names; it names them anew at a log of `_names_from`."""
        self._names_from = 0
        self._committed_from = -1
        """How long the log was before the latest commit."""
        self._end: ev.End | None = None

    def post(self, *events: ev.Event) -> None:
        """Have the machine handle events, now if it is not at work; never blocks, never raises."""
        self._inbox += events
        if not self._is_stepping:
            self._context.run(self._step)

    async def run(self) -> ev.End:
        """Drive the session; return how the stream ends, once the client was sent all that precedes it."""
        try:
            if self._deadline_ns is not None:
                late = DeadlinePassed("the deadline of the call has passed")
                self._call_at(self._deadline_ns, ev.Interrupted(late))
            self._renewal = self._spawn(self._tell_result(self.log.keep_alive))
            # Events come in the contexts of others; the effects have the span and log fields of this one.
            self._context = copy_context()
            self._context.run(self._begin)
            return await self._flush(await self._ended)
        finally:
            await self._stop()

    def _begin(self) -> None:
        self._carry_out(self.session.start(self._now()))
        self._step()

    def _step(self) -> None:
        """Handle the events of the inbox, and those that their effects cause."""
        self._is_stepping = True
        try:
            while self._inbox and not self._ended.done():
                events, self._inbox = self._inbox, []
                self._carry_out(self.session.step(*events, now=self._now()))
        except Exception as error:  # noqa: BLE001  # it ends this stream, not the work of who posted the event
            if not self._ended.done():
                self._ended.set_exception(error)
        finally:
            self._is_stepping = False

    # ------------------------------------------------------------------------------- effects --

    def _carry_out(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            getattr(self, _CARRY_OUT[type(effect)])(effect)

    def _commit(self, effect: ev.Commit) -> None:
        self.log.commit(effect, self._directory(effect), self.post)

    def _store_finish(self, effect: ev.StoreFinish) -> None:
        if self._renewal is not None:
            self._renewal.cancel()  # it would be refused once the session has ended
        self._spawn(self._finish_log(effect))

    def _emit(self, effect: ev.Emit) -> None:
        self._observer.emitted()
        self.outbox.put(effect.start, effect.end)

    def _set_timer(self, effect: ev.SetTimer) -> None:
        self._call_at(effect.at_ns, ev.TimerFired())

    def _report_round(self, effect: RoundEnded) -> None:
        if self._ports.tally is not None:
            self._ports.tally.add(effect)
        self._observer.round_ended(effect, self._ports.draft.replica, self._holder)

    def _finish(self, effect: ev.End) -> None:
        self._end = effect
        if not self._ended.done():
            self._ended.set_result(effect)

    def _start_proposal(self, effect: ev.Propose) -> None:
        self._proposing = self._spawn(self._propose(effect))

    def _cancel_proposal(self, _effect: ev.CancelPropose) -> None:
        if self._proposing is not None:
            self._proposing.cancel()

    def _extend(self, effect: ev.ExtendVerify) -> None:
        if self._verification is not None:
            self._verification.extend(effect)

    def _cancel(self, _effect: ev.CancelVerify) -> None:
        self._cancel_verification()

    async def _propose(self, effect: ev.Propose) -> None:
        timeout_ns = self._timeouts.draft_ns
        # The draft stops early, so that the tokens that are ready arrive within the timeout.
        remaining_ns = self._within(int(_DRAFT_SHARE * timeout_ns))
        reply: ev.Event
        try:
            async with asyncio.timeout(timeout_ns / SECOND):
                reply = await self._ports.draft.propose(self.session.spec, effect, remaining_ns)
        except TimeoutError:
            reply = ev.Failed(effect.request_id, "no response in time")
        if isinstance(reply, ev.CacheMissed):
            self._observer.missed(ev.Pool.DRAFT, reply.have, effect.slice.start)
        self.post(reply)

    def _verify(self, effect: ev.Verify) -> None:
        # A single verdict is useless after its timeout; with credit the request may last as long as the call.
        remaining_ns = self._remaining() if effect.credit else self._within(self._timeouts.verify_ns)
        self._observer.target_requested()
        self._late_s = self._loop.time() + self._timeouts.verify_ns / SECOND
        self._requested = effect
        self._verification = self._ports.target.verify(
            self.session.spec, effect, remaining_ns, self._take_results
        )
        if self._timer is None:
            self._timer = self._loop.call_at(self._late_s, self._check_target)

    def _take_results(self, results: Sequence[ev.VerifyEvent]) -> None:
        """Give the results of the open verification to the machine."""
        if self._verification is None or self._requested is None:
            return
        last = results[-1]
        if isinstance(last, ev.Failed):
            self._observer.target_failed(last.message)
        if not isinstance(results[0], ev.Failed):
            self._holder = self._verification.replica
        if isinstance(last, ev.CacheMissed):
            self._observer.missed(ev.Pool.TARGET, last.have, self._requested.slice.start)
        if isinstance(last, ev.Verified) and last.more:
            self._late_s = self._loop.time() + self._timeouts.verify_ns / SECOND
        else:
            self._requested = None
        self.post(*results)

    def _check_target(self) -> None:
        """Fail a verification without a response in time; otherwise look again when it would be late.

        A timer that is set once for many verdicts costs less than one a verdict.
        """
        self._timer = None
        if self._requested is None or self._verification is None:
            return
        if self._loop.time() < self._late_s:
            self._timer = self._loop.call_at(self._late_s, self._check_target)
            return
        can_move = self._verification.expire()
        failed = ev.Failed(self._requested.request_id, "no response in time", elsewhere=can_move, late=True)
        self._requested = None
        self._observer.target_failed(failed.message)
        self.post(failed)

    def _cancel_verification(self) -> None:
        self._requested = None
        if self._verification is not None:
            self._verification.close()

    async def _tell_result(self, write: Callable[[], Awaitable[ev.Event]]) -> None:
        self.post(await write())

    async def _finish_log(self, effect: ev.StoreFinish) -> None:
        event = await self.log.finish(effect)
        self.post(event)
        if isinstance(event, ev.FinishStored):
            self.on_finished()  # at last: an error in it must not keep the client from the ending

    def _directory(self, effect: ev.Commit) -> KvDirectory:
        """Return which replicas cache the session; the target is the one that reported the cache length.

        The store keeps what it has while the replicas are the same and cache a few tokens more.
        """
        named = draft, target = self._ports.draft.replica, self._holder
        is_rewritten = effect.expected_len <= self._committed_from  # a recreated session names no replica
        self._committed_from = effect.expected_len
        if effect.expected_len < self._names_from and named == self._named and not is_rewritten:
            return UNCHANGED
        self._named, self._names_from = named, effect.expected_len + _DIRECTORY_TOKENS
        return KvDirectory(
            draft=_held(draft, effect.draft_cache_len), target=_held(target, effect.target_cache_len)
        )

    # ---------------------------------------------------------------------------------- time --

    def _now(self) -> int:
        return self._ports.clock.now_ns()

    def _remaining(self) -> int | None:
        """Return the time left, at least 1 ns: 0 on the wire is no deadline."""
        return None if self._deadline_ns is None else max(1, self._deadline_ns - self._now())

    def _within(self, timeout_ns: int) -> int:
        remaining = self._remaining()
        return timeout_ns if remaining is None else min(timeout_ns, remaining)

    def _call_at(self, at_ns: int, event: ev.Event) -> None:
        delay = max(0, at_ns - self._now()) / SECOND
        self._timers.append(self._loop.call_later(delay, self.post, event))

    async def _flush(self, end: ev.End) -> ev.End:
        """Let the client read the last tokens, unless `end` forbids it; return how the stream ends."""
        if end.error is None:
            await self.outbox.flush()
            return end if self.outbox.stalled is None else ev.End(error=self.outbox.stalled)
        if not isinstance(end.error, DeadlinePassed | Cancelled | ClientStalled):
            await self.outbox.flush(_SEND_GRACE_S)
        return end

    # --------------------------------------------------------------------------------- tasks --

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[None]) -> None:
        """End the stream with an internal error if a port raised, which it must not."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("session task failed", exc_info=error)
            self.post(ev.Interrupted(Broken(f"a session task raised {type(error).__name__}")))

    async def _stop(self) -> None:
        self.outbox.close()
        for timer in self._timers:
            timer.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._cancel_verification()
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.log.close()
        finally:
            # Tasks and timers that were cancelled keep their frames, and so this object.
            self._renewal = self._verification = self._proposing = self._timer = None
            if self._ports.tally is not None:
                self._ports.tally.stop(self.session.stats)
            self._observer.stopped(self.session, self._end)


def _held(replica: Replica | None, length: int) -> CacheLocation | None:
    return None if replica is None else CacheLocation(replica.address, replica.incarnation, length)

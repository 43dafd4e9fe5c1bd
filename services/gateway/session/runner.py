"""The shell around the session machine: it executes the effects and reports their outcomes as events.

One runner serves one stream. The machine decides what to do next, and the ports know how to do it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from galley.common.logs import get_logger
from galley.core.errors import Broken, Cancelled, ClientStalled, DeadlinePassed
from galley.core.session import events as ev
from galley.core.session.events import Clock, DraftPort, Replica, RoundEnded, TargetPort, Verification
from galley.core.session.machine import Session
from galley.core.store import CacheLocation, KvDirectory
from services.gateway.clock import SECOND, Timeouts
from services.gateway.session.outbox import Outbox
from services.gateway.store.session_log import SessionLog
from services.gateway.telemetry.observer import request_observer

_SEND_GRACE_S = 5.0
"""Longest time that a stream that ends with an error waits for its client to read the confirmed tokens."""

_DRAFT_SHARE = 0.8
"""Share of the draft timeout that the draft gets as the deadline of its proposal."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ports:
    draft: DraftPort
    target: TargetPort
    clock: Clock


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
        self._inbox: asyncio.Queue[ev.Event] = asyncio.Queue()
        self.outbox = Outbox(ports.clock, timeouts.client_ns, self._inbox.put_nowait)
        self._ports = ports
        self._timeouts = timeouts
        self._deadline_ns = deadline_ns
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._observer = request_observer()
        self._renewal: asyncio.Task[None] | None = None
        self._verification: Verification | None = None
        self._following: asyncio.Task[None] | None = None
        self._proposing: asyncio.Task[None] | None = None
        self._holder: Replica | None = None
        self._end: ev.End | None = None

    def post(self, event: ev.Event) -> None:
        """Queue an event for the machine; never blocks."""
        self._inbox.put_nowait(event)

    async def run(self) -> ev.End:
        """Drive the session; return how the stream ends, once the client was sent all that precedes it."""
        try:
            if self._deadline_ns is not None:
                late = DeadlinePassed("the deadline of the call has passed")
                self._call_at(self._deadline_ns, ev.Interrupted(late))
            self._renewal = self._spawn(self._tell_result(self.log.keep_alive))
            self._carry_out(self.session.start(self._now()))
            while self._end is None:
                event = await self._inbox.get()
                self._carry_out(self.session.step(event, self._now()))
            return await self._flush(self._end)
        finally:
            await self._stop()

    # ------------------------------------------------------------------------------- effects --

    def _carry_out(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.Propose() | ev.CancelPropose() | ev.Verify() | ev.ExtendVerify() | ev.CancelVerify():
                    self._call_pool(effect)
                case ev.Commit():
                    self.log.commit(effect, self._directory(effect), self.post)
                case ev.StoreFinish():
                    if self._renewal is not None:
                        self._renewal.cancel()  # it would be refused once the session has ended
                    self._spawn(self._tell_result(partial(self.log.finish, effect)))
                case ev.Emit():
                    self.outbox.put(self._observer.emitted(effect.items), effect.end)
                case ev.SetTimer():
                    self._call_at(effect.at_ns, ev.TimerFired())
                case RoundEnded():
                    self._observer.round_ended(effect, self._ports.draft.replica, self._holder)
                case ev.End():
                    self._end = effect

    def _call_pool(
        self, effect: ev.Propose | ev.CancelPropose | ev.Verify | ev.ExtendVerify | ev.CancelVerify
    ) -> None:
        """Execute an effect for a replica; the machine has at most one request at each pool."""
        match effect:
            case ev.Propose():
                self._proposing = self._spawn(self._propose(effect))
            case ev.CancelPropose() if self._proposing is not None:
                self._proposing.cancel()
            case ev.Verify():
                self._verify(effect)
            case ev.ExtendVerify() if self._verification is not None:
                self._verification.extend(effect)
            case ev.CancelVerify() if self._following is not None:
                self._following.cancel()

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
        self._verification = self._ports.target.verify(self.session.spec, effect, remaining_ns)
        self._following = self._spawn(self._follow(self._verification, effect))

    async def _follow(self, verification: Verification, request: ev.Verify) -> None:
        """Report each response to the machine; one that is late has failed."""
        timeout_s = self._timeouts.verify_ns / SECOND
        try:
            async with asyncio.timeout(timeout_s) as timer, aclosing(verification):
                async for answer in verification:
                    if isinstance(answer, ev.Failed):
                        self._observer.target_failed(answer.message)
                    else:
                        self._holder = verification.replica
                    if isinstance(answer, ev.CacheMissed):
                        self._observer.missed(ev.Pool.TARGET, answer.have, request.slice.start)
                    self.post(answer)
                    timer.reschedule(asyncio.get_running_loop().time() + timeout_s)
        except TimeoutError:
            failed = ev.Failed(request.request_id, "no response in time")
            self._observer.target_failed(failed.message)
            self.post(failed)

    async def _tell_result(self, write: Callable[[], Awaitable[ev.Event]]) -> None:
        self.post(await write())

    def _directory(self, effect: ev.Commit) -> KvDirectory:
        """Return which replicas cache the session; the target is the one that reported the cache length."""
        return KvDirectory(
            draft=_held(self._ports.draft.replica, effect.draft_cache_len),
            target=_held(self._holder, effect.target_cache_len),
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
        self._timers.append(asyncio.get_running_loop().call_later(delay, self.post, event))

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
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.log.close()
            if self._verification is not None:
                await self._verification.aclose()  # its task may have been cancelled before it began
        finally:
            # Tasks that were cancelled keep their frames, and so this object.
            self._renewal = self._verification = self._following = self._proposing = None
            self._observer.stopped(self.session, self._end)


def _held(replica: Replica | None, length: int) -> CacheLocation | None:
    return None if replica is None else CacheLocation(replica.address, replica.incarnation, length)

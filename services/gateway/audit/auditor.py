"""Audits: compute answers of finished sessions again at a target, and compare them with their token logs.

Those of clients run at once, at the lowest priority. Those that the gateway makes by itself are of a share of
the finished sessions. At each target they run one at a time, only while it has no other request, and take at
most `MOST_SHARE` of its time, over all gateways. A session waits until a target of its build is idle and has
rested; it is read then, and again before each turn of a target. One that expires or is deleted first is
counted as skipped. An audit changes nothing of a session, and never fails one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection
from contextvars import Context
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

from galley.common.logs import get_logger
from galley.common.shared_work import SharedWork
from galley.core.admission.admission import Principal
from galley.core.answer.answer import SessionSpec
from galley.core.audit import AuditCounts, AuditReport, Verdict
from galley.core.errors import GalleyError, LogLost, StoreUnavailable, TargetUnavailable, UnknownSession
from galley.core.routing.choice import HashedTokens, RoutingRequest
from galley.core.session import events as ev
from galley.core.session.events import Clock, VerifyEvent
from galley.core.session.machine import Session
from galley.core.store import SessionStore, StoredSession
from services.gateway.audit.logged_answer import LoggedAnswer, logged_answer
from services.gateway.audit.records import AuditRecords, is_incident, report_facts
from services.gateway.audit.replay import Replay
from services.gateway.audit.verification import AuditedReplica, audited_spec, is_idle
from services.gateway.clock import MILLISECOND, SECOND
from services.gateway.replicas.targets import TargetPool, TargetReplica
from services.gateway.telemetry.call import VALUE
from services.gateway.telemetry.component_metrics import AuditMetrics, Skipped

MAX_WAITING = 1000
"""Finished sessions that wait for their audit; the oldest are dropped."""
_TURN_NS = 1 * SECOND
"""Computing time after which an audit that a gateway makes by itself lets its target rest."""
_MOST_NS = 30 * SECOND
"""Computing time after which such an audit ends: its target rests for 50 minutes by then."""
_LOOK_S = 0.5
"""Time until the next look at a target that was busy."""
_LONGEST_REST_S = 5.0
_ABSENT_NS = 300 * SECOND
"""A session waits so long for a target of its build, which may start again, before other builds are tried."""
_MAX_FAILURES = 3
_RETRY_S = 0.2
_COUNTS_NS = 1 * SECOND
_PARTS = 1 << 32

_log = get_logger(__name__)


def is_drawn(session_id: str, ratio: float) -> bool:
    """Return True if the session is in the share `ratio` of sessions that gateways audit."""
    digest = blake2b(session_id.encode(), digest_size=4, person=b"galley.audit").digest()
    return int.from_bytes(digest, "little") < ratio * _PARTS


@dataclass(frozen=True, slots=True)
class AuditTools:
    """The parts of a gateway that audits use.

    A request to a target fails after `verify_ns`. The store keeps a finished session for `kept_ns`.
    """

    targets: TargetPool
    store: SessionStore
    records: AuditRecords
    clock: Clock
    verify_ns: int
    kept_ns: int
    metrics: AuditMetrics | None = None


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A finished session that waits for its audit until `expires_ns`.

    `routing` names the build that computed its last token, until the session is read. Then it names the one
    that audits, and `replica` is the one that served.
    """

    session_id: str
    principal: str
    routing: RoutingRequest
    expires_ns: int
    replica: str = ""


class _Needs(NamedTuple):
    """Facts of a session that decide which targets may audit it, but for the one that served it."""

    build: str
    lora: str
    grammar: str
    is_long: bool
    """Longer than some target's context window."""


class _Run:
    """The replay of one answer at one replica at a time, of the build `fingerprint`."""

    def __init__(self, tools: AuditTools, answer: LoggedAnswer, target: TargetReplica) -> None:
        self.fingerprint = target.fingerprint
        self.compute_ns = 0
        # What runs at the address later may promise less or more.
        self._is_deterministic = target.client.info.deterministic
        self._tools = tools
        self._answer = answer
        self._spec = audited_spec(answer.spec)
        most = target.client.info.max_draft_tokens
        self.replay = Replay(answer, answer.ranges_of(self.fingerprint), most, self._spec.session_id)
        self.replica = AuditedReplica(target, self._spec, tools.verify_ns)
        self._failed: set[str] = set()
        self._failures = 0
        self._is_given_up = False
        self.problem = ""
        """Why the latest request that failed did so."""

    async def step(self, *, only_while_idle: bool) -> bool:
        """Have the replica compute one chunk. Return False if it should not go on at once.

        It failed, so the next chunk goes elsewhere if possible, or sessions have come, or its time is over.
        """
        request, began_ns = self.replay.request(), self._tools.clock.now_ns()
        try:
            if only_while_idle:
                response = await self.replica.verify_while_idle(request, _MOST_NS - self.compute_ns)
            else:
                response = await self.replica.verify(request)
        except asyncio.CancelledError:
            self.compute_ns += self._tools.clock.now_ns() - began_ns
            raise
        if isinstance(response, ev.Verified):
            self.compute_ns += response.timing.compute_ns
            if response.fingerprint == self.fingerprint and self.replay.take(response):
                self._failures = 0
                return True
        else:  # it may have computed without saying so
            self.compute_ns += self._tools.clock.now_ns() - began_ns
        if response is None:
            return False
        self._failures += 1
        self.problem = _problem_of(response)
        if isinstance(response, ev.CacheMissed):
            self.replay.miss(response)
            return True
        self.move()
        return False

    @property
    def is_over(self) -> bool:
        return self.replay.is_done or self.has_failed or self._is_given_up

    @property
    def has_failed(self) -> bool:
        return self._failures > _MAX_FAILURES

    def move(self) -> bool:
        """Go on at another replica of the build: this one has failed. Return False if there is none."""
        self.replay.restart()
        self._failed.add(self.replica.target.address)
        other = choose(self._tools.targets, routing(self._answer.spec, self.fingerprint), self._failed)
        if other is None or other is self.replica.target:
            return False
        self.replica = AuditedReplica(other, self._spec, self._tools.verify_ns)
        return True

    def give_up(self) -> None:
        """Compare no further tokens: no replica of the build is left."""
        self._is_given_up = True

    def report(self, session_id: str) -> AuditReport:
        replay, target = self.replay, self.replica.target
        if not replay.compared:
            verdict = Verdict.NOT_COMPARED
        else:
            verdict = Verdict.DIFFERS if replay.differing else Verdict.SAME
        return AuditReport(
            session_id,
            verdict,
            self._answer.output_tokens,
            replay.compared,
            replay.differing,
            tuple(replay.differences),
            self.fingerprint,
            self._is_deterministic,
            target.address,
        )


class Auditor:
    """The audits of one gateway; `ratio` is the share of finished sessions that it audits by itself."""

    def __init__(self, tools: AuditTools, ratio: float) -> None:
        self.ratio = ratio
        self._tools = tools
        self._waiting: deque[_Drawn] = deque()
        self._working: asyncio.Task[None] | None = None
        self._audits: dict[str, asyncio.Task[None]] = {}
        """By the address of the target; that of a session whose build no target has is empty."""
        self._rests: dict[str, int] = {}
        """When to look again at a target that was busy or rested."""
        self._absent: dict[_Needs, int] = {}
        """What sessions need and no target offers, each since when."""
        self._turns: set[str] = set()
        """The targets that compute: an audit whose replica failed goes on where another one may run."""
        self._is_closed = False
        self._is_delayed = False
        """True while the store is away, which is logged once."""
        self._counts: tuple[int, AuditCounts] | None = None
        self._counting = SharedWork(self._read_counts)
        self._incidents: deque[str] = deque(maxlen=MAX_WAITING)
        """The sessions of the latest stored incidents: one that is audited again is no further incident."""
        if tools.metrics is not None:
            tools.metrics.observe_waiting(lambda: len(self._waiting) + len(self._audits))

    # --------------------------------------------------------------------------------- by hand --

    async def audit(self, stored: StoredSession) -> AuditReport:
        """Audit a finished session now. Raise TargetUnavailable if its target fails before any comparison."""
        session_id = stored.ownership.session_id
        try:
            answer = await logged_answer(stored)
        except LogLost:
            return await self.damaged(session_id)
        target = choose_first(self._tools.targets, answer)
        if target is None:
            return await self._note(_not_compared(answer, session_id), 0)
        run = _Run(self._tools, answer, target)
        await run.replay.prepare()
        while not run.is_over:
            if not await run.step(only_while_idle=False):
                await asyncio.sleep(_RETRY_S)
        report = run.report(session_id)
        if run.has_failed and not report.compared:
            raise TargetUnavailable(f"no verdict from the target: {run.problem}")
        return await self._note(report, run.compute_ns)

    async def damaged(self, session_id: str) -> AuditReport:
        """Return and note the report on a session that does not agree with its hash."""
        return await self._note(AuditReport(session_id, Verdict.DAMAGED), 0)

    async def counts(self) -> AuditCounts:
        """Return the totals of all gateways, at most a second old. Raise GalleyError without the store."""
        if self._counts is None or self._tools.clock.now_ns() - self._counts[0] >= _COUNTS_NS:
            return await self._counting.done()
        return self._counts[1]

    async def _read_counts(self) -> AuditCounts:
        began_ns, counts = self._tools.clock.now_ns(), await self._tools.records.counts()
        self._counts = began_ns, counts
        return counts

    # ------------------------------------------------------------------------------- by itself --

    def note_finished(self, session: Session, _stored: StoredSession, principal: Principal) -> None:
        """Draw whether to audit a session that has finished."""
        spec = session.spec
        if self._is_closed or spec.no_audit or not session.answer.output_len:
            return
        if not is_drawn(spec.session_id, self.ratio):
            return
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._skip("backlog")
        build = routing(spec, session.answer.fingerprint or "")
        expires_ns = self._tools.clock.now_ns() + self._tools.kept_ns
        self._waiting.append(_Drawn(spec.session_id, principal.name, build, expires_ns))
        if self._working is None:
            # In a context of its own: the task outlives the call that happens to begin it.
            self._working = asyncio.create_task(self._work(), context=Context())

    def stop(self) -> None:
        """End all audits that the gateway makes by itself; none begins afterwards."""
        if self._is_closed:  # a second cancellation would end what an audit does at its end
            return
        self._is_closed = True
        self._skip("drained", len(self._waiting))
        self._waiting.clear()
        if self._working is not None:
            self._working.cancel()

    async def close(self) -> None:
        self.stop()
        if self._working is not None:
            await asyncio.wait([self._working])
        await self._tools.records.close()

    async def _work(self) -> None:
        try:
            while self._waiting or self._audits:
                self._begin_audits()
                if audits := list(self._audits.values()):
                    await asyncio.wait(audits, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(_LOOK_S)
        finally:
            for audit in self._audits.values():
                audit.cancel()
            await asyncio.gather(*self._audits.values(), return_exceptions=True)
            self._audits.clear()  # one that was cancelled before its first step has not removed itself
            self._working = None

    def _begin_audits(self) -> None:
        """Begin an audit at each target that may have time for one."""
        now_ns = self._tools.clock.now_ns()
        while self._waiting and self._waiting[0].expires_ns <= now_ns:
            self._waiting.popleft()
            self._skip("expired")
        self._rests = {address: end_ns for address, end_ns in self._rests.items() if end_ns > now_ns}
        targets = self._tools.targets
        leases = targets.leases()
        loaded = {it.address for it in leases if it.queue_depth} if targets.knows_load else set()
        window = min((it.context_window for it in leases), default=0)
        used = {*self._audits, *self._rests, *loaded}
        hopeless, absent = set(), dict[_Needs, int]()
        for drawn in list(self._waiting):
            needs = _needs_of(drawn.routing, window)
            if (alike := (needs, drawn.replica)) in hopeless:
                continue
            target = self._target_of(drawn, used)
            address = "" if target is None else target.address
            if target is None:
                absent[needs] = self._absent.get(needs, now_ns)
            if address in used or (target is None and now_ns - absent[needs] < _ABSENT_NS):
                hopeless.add(alike)
                continue
            self._waiting.remove(drawn)
            used.add(address)
            self._audits[address] = asyncio.create_task(self._audit_drawn(drawn, address, target))
        self._absent = absent

    def _target_of(self, drawn: _Drawn, used: Collection[str]) -> TargetReplica | None:
        """Return the target to audit at, one that is not in use if possible.

        The one that served is taken only if it is alone.
        """
        target = choose(self._tools.targets, drawn.routing, {drawn.replica, *used})
        if target is not None and target.address not in used and target.address != drawn.replica:
            return target
        return choose(self._tools.targets, drawn.routing, {drawn.replica})

    async def _audit_drawn(self, drawn: _Drawn, address: str, target: TargetReplica | None) -> None:
        """Audit a session, or let it wait further if the target has no time, or the store is away."""
        session_id, audited = drawn.session_id, None
        try:
            if target is not None and (wait_s := await self._wait_s(target)):
                self._rests[target.address] = self._tools.clock.now_ns() + int(wait_s * SECOND)
                self._waiting.appendleft(drawn)
            elif audited := await self._audit_later(drawn, target):
                await self._note(*audited, can_wait=True)
            self._is_delayed = False
        except UnknownSession:
            self._is_delayed = False
            self._skip("expired")
        except StoreUnavailable as error:
            self._waiting.appendleft(drawn)
            await self._delay(session_id, error)
        except asyncio.CancelledError:
            if not audited:
                self._skip("drained")
            raise
        except Exception as error:  # noqa: BLE001  # the next session is audited nevertheless
            _log.warning("audit failed", session_id=session_id, error=str(error))
            self._skip("failed")
            await asyncio.sleep(_LOOK_S)
        finally:
            del self._audits[address]

    async def _wait_s(self, target: TargetReplica) -> float:
        """Return the time until the next look at a target that rests or is busy; 0 if it has time."""
        if wait_ms := await self._tools.records.wait_ms(target.address):
            return min(wait_ms / 1000, _LONGEST_REST_S)
        return 0.0 if await is_idle(target) else _LOOK_S

    async def _audit_later(
        self, drawn: _Drawn, target: TargetReplica | None
    ) -> tuple[AuditReport, int] | None:
        """Audit a session in the idle time of the target; return the report and the computing time.

        None: it waits for a target that suits it better.
        """
        try:
            return await self._compare(drawn, target)
        except LogLost:
            return AuditReport(drawn.session_id, Verdict.DAMAGED), 0

    async def _compare(self, drawn: _Drawn, target: TargetReplica | None) -> tuple[AuditReport, int] | None:
        answer = await logged_answer(await self._tools.store.read(drawn.session_id, drawn.principal))
        first = choose_first(self._tools.targets, answer)
        if first is None:
            return _not_compared(answer, drawn.session_id), 0
        is_served = target is not None and target.address == answer.replica != first.address
        if target is None or target.fingerprint != first.fingerprint or is_served:
            build = routing(answer.spec, first.fingerprint)
            self._waiting.appendleft(replace(drawn, routing=build, replica=answer.replica))
            return None
        run = _Run(self._tools, answer, target)
        await run.replay.prepare()
        if reason := await self._take_turns(drawn, run):
            self._skip(reason)
        return run.report(drawn.session_id), run.compute_ns

    async def _take_turns(self, drawn: _Drawn, run: _Run) -> Skipped | None:
        """Have targets compute until the audit ends; return why it did so before the answer's end."""
        try:
            while not run.is_over and run.compute_ns < _MOST_NS:
                await self._take_turn(drawn, run)
        except UnknownSession:
            if not run.replay.compared:
                raise
            return "expired"
        if run.has_failed:
            _log.warning("audit failed", session_id=drawn.session_id, error=run.problem)
            return "failed"
        return None if run.is_over else "long"

    def _skip(self, reason: Skipped, sessions: int = 1) -> None:
        if self._tools.metrics is not None:
            self._tools.metrics.skipped(reason, sessions)

    async def _take_turn(self, drawn: _Drawn, run: _Run) -> None:
        """Have the target compute for a turn, while it is idle, or wait until it may be."""
        target = run.replica.target
        if not (target.is_accepted and target.is_up) and not run.move():
            run.give_up()
            return
        replica, address = run.replica, run.replica.target.address
        if address in self._turns or not await is_idle(replica.target):
            await asyncio.sleep(_LOOK_S)
            return
        self._turns.add(address)
        try:
            await self._compute(drawn, run, replica)
        finally:
            self._turns.remove(address)

    async def _compute(self, drawn: _Drawn, run: _Run, replica: AuditedReplica) -> None:
        """Have an idle target compute for a turn, or wait for the turn.

        Raise UnknownSession for a session that was deleted or has expired meanwhile: it goes to no target.
        """
        session_id, address = drawn.session_id, replica.target.address
        try:
            wait_ms = await self._tools.records.begin_turn(address)
        except StoreUnavailable as error:  # not raised: the run keeps what it has compared
            await self._delay(session_id, error)
            return
        if wait_ms:
            await asyncio.sleep(min(wait_ms / 1000, _LONGEST_REST_S))
            return
        before_ns = run.compute_ns
        try:
            await self._tools.store.read(session_id, drawn.principal)
            self._is_delayed = False
            while not run.is_over and run.compute_ns - before_ns < _TURN_NS:
                if not await run.step(only_while_idle=True) or not await is_idle(replica.target):
                    break
        except StoreUnavailable as error:
            await self._delay(session_id, error)
        finally:
            await self._end_turn(session_id, address, run.compute_ns - before_ns)

    async def _end_turn(self, session_id: str, address: str, compute_ns: int) -> None:
        """End the turn once the store is there. The target may rest too short after one that expires."""
        task = asyncio.current_task()
        while True:
            try:
                await self._tools.records.end_turn(address, compute_ns)
            except StoreUnavailable as error:
                if task is None or task.cancelling():
                    return
                await self._delay(session_id, error)
            else:
                return

    async def _delay(self, session_id: str, error: StoreUnavailable) -> None:
        if not self._is_delayed:
            _log.warning("audit delayed", session_id=session_id, error=str(error))
        self._is_delayed = True
        await asyncio.sleep(_LOOK_S)

    # ---------------------------------------------------------------------------------- results --

    async def _note(self, report: AuditReport, compute_ns: int, *, can_wait: bool = False) -> AuditReport:
        """Count, log and store a report, and return it; an incident only until it is stored.

        With `can_wait`, an incident waits for the store. Other reports would count twice if a reply was lost.
        """
        if is_incident(report) and report.session_id in self._incidents:
            return report
        _log_report(report)
        if self._tools.metrics is not None:
            self._tools.metrics.audited(report, compute_ns)
        try:
            await self._store(report, can_wait=can_wait and is_incident(report))
        except GalleyError as error:
            _log.warning("audit not stored", session_id=report.session_id, error=str(error))
        except asyncio.CancelledError:
            _log.warning("audit not stored", session_id=report.session_id, error="it was cancelled")
            raise
        else:
            if is_incident(report):
                self._incidents.append(report.session_id)
        self._counts = None
        return report

    async def _store(self, report: AuditReport, *, can_wait: bool) -> None:
        at_ms = time.time_ns() // MILLISECOND
        while True:
            try:
                await self._tools.records.add(report, at_ms)
            except StoreUnavailable as error:
                if not can_wait:
                    raise
                await self._delay(report.session_id, error)
            else:
                return


def _needs_of(request: RoutingRequest, window: int) -> _Needs:
    kind = "" if request.grammar is None else request.grammar.kind
    return _Needs(request.fingerprint, request.lora, kind, request.max_position > window)


def choose_first(targets: TargetPool, answer: LoggedAnswer) -> TargetReplica | None:
    """Return a target of the build that computed most of the answer, among those that are there."""
    chosen = (choose(targets, routing(answer.spec, name), {answer.replica}) for name in answer.builds())
    return next((target for target in chosen if target is not None), None)


def choose(targets: TargetPool, request: RoutingRequest, avoid: Collection[str]) -> TargetReplica | None:
    """Return a target of the build; one to `avoid` only if there is no other. None if there is none."""
    chosen = targets.choose(request, avoid)
    if chosen is None or not chosen.is_up or chosen.fingerprint != request.fingerprint:
        return None
    return chosen


def routing(spec: SessionSpec, fingerprint: str) -> RoutingRequest:
    """Return the request for a target of the build that may compute the session; it names no tokens."""
    return RoutingRequest(
        HashedTokens(()), spec.max_position, fingerprint, None, spec.lora, spec.session_id, spec.grammar
    )


def _problem_of(response: VerifyEvent) -> str:
    """Return why a response brings no tokens, without the part of it that repeats a value."""
    if isinstance(response, ev.Failed):
        return response.message.partition(VALUE)[0]
    if isinstance(response, ev.CacheMissed):
        return "the target does not keep the tokens of the audit"
    return "the response is of another build or position"


def _not_compared(answer: LoggedAnswer, session_id: str) -> AuditReport:
    return AuditReport(session_id, Verdict.NOT_COMPARED, answer.output_tokens)


def _log_report(report: AuditReport) -> None:
    facts = report_facts(report)
    if is_incident(report):
        first = report.differences[0].index if report.differences else None
        _log.error("audit found an incident", **facts, first_index=first)
    else:
        _log.info("session audited", **facts)

"""A whole system in one process, which runs one schedule and reports whether every rule held."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import structlog

from galley.client.options import Retries
from services.gateway.request.validate import tenant_salt_for
from tests.fakes.kv_check import check_table
from tests.simulation import schedule as settings
from tests.simulation.client import SimClient
from tests.simulation.faults import Faults
from tests.simulation.ledger import Ledger, Violation
from tests.simulation.schedule import ID_SECRET, Fault, PlannedSession, Schedule
from tests.simulation.schedules.limits import grown_s, limited
from tests.simulation.system.call import Server, current_call
from tests.simulation.system.copies import Copies
from tests.simulation.system.gateway import SimGateway
from tests.simulation.system.loop import Deadlock, Livelock, SimLoop, virtual_time
from tests.simulation.system.network import Network
from tests.simulation.system.redis import Sessions, SimRedis
from tests.simulation.system.replicas import SimDraft, SimEngine, SimTarget
from tests.simulation.verdicts import LEAVE_OWNERS, Verdicts
from tests.simulation.versions import WorldVersions

if TYPE_CHECKING:
    from galley.core.kv.table import KvTable

_READY_S = 5.0
_LEAVE_ALONE = LEAVE_OWNERS - {"stall", "jump"}
"""Faults that do not stop a session from continuing without its client."""
_DELAY_READERS = frozenset({"stall", "cut", "deaf", "freeze", "slow", "elsewhere"})
_DELAY_RENEWALS = frozenset({"redis-crash", "failover", "lossy", "cut", "deaf", "freeze", "slow", "kill"})
_FENCED_S = 1.0
"""Time after its next renewal within which a fenced owner notices it."""
_HEALED_S = 60.0
"""Time after the last fault within which all answers must be complete."""
_SETTLE_S = 1.0
_MENDED_S = 1.5
"""Time after the last fault within which drafts must be used again."""
_LONG_S = 1.5
_MOST_RETURNS = 20


@dataclass(frozen=True, slots=True)
class Kinds:
    """The classes that a mutant replaces."""

    engine: type[SimEngine] = SimEngine
    sessions: type[Sessions] = Sessions
    copies: type[Copies] = Copies


@dataclass(frozen=True, slots=True)
class Outcome:
    """`trace` is the hash of the trace, `lines` the trace if kept; `met` counts handled faults."""

    seed: int
    violation: str | None
    trace: str
    events: int
    virtual_s: float
    met: Mapping[str, int]
    lines: tuple[str, ...] = ()


class World:
    def __init__(self, schedule: Schedule, ledger: Ledger, kinds: Kinds) -> None:
        self.schedule = schedule
        self.ledger = ledger
        self.kinds = kinds
        timing = schedule.timing
        self.network = Network(schedule.seed, timing.keepalive_s, timing.pings_s)
        self.verdicts = Verdicts(self)
        self.servers: dict[str, Server] = {}
        self.specs = {planned.spec.session_id: planned.spec for planned in schedule.sessions}
        self.redis = SimRedis(
            self.network, ledger, schedule, settings.FINISHED_TTL_S, kinds.sessions, kinds.copies
        )
        self.snapshots: dict[Fault, object] = {}
        plan = schedule.versions
        self.versions = None if plan is None else WorldVersions(self, plan)
        self.targets = {
            f"target-{i}": SimTarget(self, f"target-{i}", build) for i, build in enumerate(schedule.builds)
        }
        self.drafts = {f"draft-{i}": SimDraft(self, f"draft-{i}") for i in range(schedule.drafts)}
        self.gateways = [SimGateway(self, f"gateway-{i}") for i in range(schedule.gateways)]
        self.nodes: dict[str, SimTarget | SimDraft | SimGateway] = {
            **self.targets,
            **self.drafts,
            **{gateway.address: gateway for gateway in self.gateways},
        }
        self.clients: dict[str, SimClient] = {}
        self.ready_s = self.healed_s = 0.0

    async def run(self) -> None:
        if self.versions is not None:
            self.versions.begin()
        await self._until(lambda: all(gateway.ready for gateway in self.gateways), _READY_S, "not ready")
        loop = asyncio.get_running_loop()
        faults = Faults(self)
        for fault in self.schedule.faults:
            faults.plan(fault)
        if self.versions is not None:
            self.versions.plan()
        principals = {principal.name: principal for principal in self.schedule.principals}
        for planned in self.schedule.sessions:
            principal = principals[planned.principal]
            self.ledger.opened(planned.spec, principal, tenant_salt_for(principal.name, ID_SECRET))
            client = SimClient(self, planned.client, planned)
            self.clients[planned.client] = client
            loop.call_later(planned.at_s, client.start)
        self.ready_s = loop.time()
        self.healed_s = self.ready_s + self.schedule.healed_s
        await asyncio.sleep(self.schedule.healed_s)
        await self._until(self._all_answered, _HEALED_S, "an answer never came")
        await self._until(self._orphans_ended, _HEALED_S, "what goes on without its client never ends")
        self._check_drafts()
        if self.versions is not None:
            await self._until(self._versions_settled, _HEALED_S, "versions of drafts are not settled")
        await self._audit()
        await asyncio.sleep(max(_SETTLE_S, self.network.moves_known_s - loop.time()))
        await self._until(self._replicas_rest, _HEALED_S, "a replica works for nobody, or holds its blocks")
        unrest = "a gateway is not ready, or has streams that nobody uses"
        await self._until(self._gateways_rest, _HEALED_S, unrest)
        for target in self.targets.values():
            check_table(cast("KvTable", target.target.kv))
        for gateway in self.gateways:
            await gateway.check_leaks()

    def add_client(
        self, name: str, planned: PlannedSession, before: SimClient | None = None
    ) -> SimClient | None:
        if name in self.clients:
            return None
        client = self.clients[name] = SimClient(self, name, replace(planned, within_s=None), before)
        client.start()
        return client

    def planned(self, client: str) -> PlannedSession:
        return next(planned for planned in self.schedule.sessions if planned.client == client)

    def ended_unread(self, gateway: str, session_id: str) -> None:
        """Check a stream that a gateway ended because it was left unread."""
        kinds = {fault.kind for fault in self.schedule.faults}
        slowest_s = max(planned.pause_s for planned in self.schedule.sessions)
        gone = any(one.went_elsewhere for one in self.clients.values() if one.spec.session_id == session_id)
        if not (gone or kinds & _DELAY_READERS) and slowest_s < self.unread_s:
            self.ledger.violate(f"{gateway} ended a stream that was read in time")
        fenced_s = self.ledger.fenced_s(session_id, current_call())
        if fenced_s > self.schedule.timing.renew_s + _FENCED_S and not kinds & _DELAY_RENEWALS:
            self.ledger.violate(f"{gateway} calls a stream unread that is fenced for {fenced_s:.1f} s")

    @property
    def unread_s(self) -> float:
        return 0.9 * self.schedule.client_s

    def has_only(self, kinds: frozenset[str]) -> bool:
        return all(fault.kind in kinds for fault in self.schedule.faults)

    def has_any(self, kinds: Collection[str]) -> bool:
        return any(fault.kind in kinds for fault in self.schedule.faults)

    def _orphans_ended(self) -> bool:
        failing_s = sum(fault.for_s for fault in self.schedule.faults if fault.kind == "engine-fails")
        may_fail = failing_s > self.schedule.timing.target_s - 0.1  # an only target, of which nobody hears
        if may_fail or self.verdicts.may_fill_targets() or not self.has_only(_LEAVE_ALONE):
            return True
        return all(
            client.spec.session_id in self.ledger.finished_at
            or self.redis.sessions.is_finished(client.spec.session_id)
            for client in self.clients.values()
            if client.left
            and client.spec.continue_without_client
            and client.planned.within_s is None
            and client.spec.session_id in self.ledger.was_streamed
        )

    def _versions_settled(self) -> bool:
        return self.versions is None or self.versions.are_settled

    def _replicas_rest(self) -> bool:
        """Return True if no replica has a request, and no target a KV block of a live session."""
        targets = [target.target for target in self.targets.values()]
        return not (
            any(target.queue_depth or target.kv.live_blocks for target in targets)
            or any(draft.service._loop.queue_depth for draft in self.drafts.values())
        )

    def _gateways_rest(self) -> bool:
        """Return True if all are ready, and no stream is left: one whose log is damaged may go on alone."""
        return all(gateway.ready and not gateway.streams.left for gateway in self.gateways)

    def _all_answered(self) -> bool:
        return all(client.done for client in self.clients.values()) and all(
            node.process.alive for node in self.nodes.values()
        )

    async def _until(self, true: Callable[[], bool], within_s: float, what: str) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + within_s
        while not true():
            if loop.time() > end_s:
                waiting = [client.process.name for client in self.clients.values() if not client.done]
                self.ledger.violate(f"{what}: {waiting}")
            await asyncio.sleep(0.1)

    def _check_drafts(self) -> None:
        """Check that a stream that continues long after the last fault uses drafts again."""
        mended_s = _MENDED_S + grown_s(self.schedule)
        for planned in self.schedule.sessions if self.drafts else ():
            session_id = planned.spec.session_id
            owned_s = self.ledger.owned_at.get(session_id, 0.0)
            since_s = max(self.healed_s, owned_s, self.ledger.rests_until_s) + mended_s
            grew_s = self.ledger.grew_at.get(session_id, 0.0)
            if planned.long and grew_s > since_s + _LONG_S:
                self.ledger.met["drafts again"] += 1
                if self.ledger.drafted_at.get(session_id, 0.0) < since_s:
                    self.ledger.violate(f"{session_id} was not drafted for again since {since_s:.3f} s")

    async def _audit(self) -> None:
        """Read every answer again from its beginning, beside those that resume it where they broke off.

        One session after another: together they may ask for more tokens than their budget gains in time.
        """
        before = list(self.clients.values())
        for planned in self.schedule.sessions:
            patient = replace(planned, pause_s=0.0, retries=Retries(), returns=_MOST_RETURNS)
            for client in before:
                if client.planned.name == planned.name and client.error and client.stream is not None:
                    self.add_client(f"{client.process.name} once more", patient, client)
            self.add_client(f"auditor of {planned.name}", patient)
            await self._until(self._all_answered, _HEALED_S, "cannot be resumed")


def run_schedule(schedule: Schedule, kinds: Kinds | None = None, *, keep: bool = False) -> Outcome:
    loop = SimLoop()
    gc.disable()  # when it collects is not deterministic
    try:
        with virtual_time(loop), limited(schedule):
            return _run_on(loop, schedule, kinds or Kinds(), keep=keep)
    finally:
        loop.close()
        gc.enable()


@contextmanager
def quiet() -> Iterator[None]:
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)


def _run_on(loop: SimLoop, schedule: Schedule, kinds: Kinds, *, keep: bool) -> Outcome:
    ledger = loop.run_until_complete(_new_ledger(loop, keep=keep))
    try:
        loop.run_until_complete(_play(schedule, ledger, kinds))
    except (Violation, Deadlock, Livelock) as error:
        ledger.violation = ledger.violation or str(error) or type(error).__name__
    outcome = Outcome(
        schedule.seed,
        ledger.violation,
        ledger.trace,
        ledger.events,
        loop.time(),
        dict(ledger.met),
        tuple(ledger.lines),
    )
    loop.set_exception_handler(lambda *_: None)
    loop.run_until_complete(_end_all())
    return outcome


async def _new_ledger(loop: SimLoop, *, keep: bool) -> Ledger:
    ledger = Ledger(keep=keep)
    loop.set_exception_handler(lambda _, context: ledger.unhandled(context))
    return ledger


async def _play(schedule: Schedule, ledger: Ledger, kinds: Kinds) -> None:
    script = asyncio.ensure_future(World(schedule, ledger, kinds).run())
    await asyncio.wait({script, ledger.failed}, return_when=asyncio.FIRST_COMPLETED)
    if script.done():
        script.result()


async def _end_all() -> None:
    mine = asyncio.current_task()
    for _ in range(20):
        others = asyncio.all_tasks() - {mine}
        if not others:
            break
        for task in others:
            task.cancel()
        await asyncio.sleep(0.001)
    await asyncio.get_running_loop().shutdown_asyncgens()

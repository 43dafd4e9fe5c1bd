"""A gateway of the simulation: the real one behind its interceptors, without a socket."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from galley.common.fair_threads import FairThreads
from galley.common.registry.leases import DRAFT_POOL, TARGET_POOL
from galley.core.errors import TargetUnavailable
from galley.core.session.machine import Session, SessionLimits
from galley.core.store import StoredSession
from services.gateway.audit.auditor import Auditor, AuditTools
from services.gateway.clock import SECOND, Timeouts
from services.gateway.generation import Generation, ServedModel
from services.gateway.replicas.membership import RegisteredAddresses
from services.gateway.replicas.targets import TargetPool, TargetRequirements
from services.gateway.request.grammars import Grammars
from services.gateway.request.validate import Limits
from services.gateway.service import GatewayService
from services.gateway.servicer import GenerationServicer
from services.gateway.session.own_sources import OwnSources
from services.gateway.session.runner import Ports
from services.gateway.session.tally import SessionTally
from services.gateway.telemetry.observer import RequestObservers
from services.gateway.versions.keeper import VersionKeeper
from tests.fakes.truth import letters
from tests.simulation import schedule as settings
from tests.simulation.grammars import VOCABULARY
from tests.simulation.schedule import ID_SECRET, Schedule
from tests.simulation.system.audits import SimAudits
from tests.simulation.system.call import Server
from tests.simulation.system.http import Letters, SimHttp
from tests.simulation.system.loop import Process, running_loop
from tests.simulation.system.redis import SimRegistry, SimStore, SimVersions
from tests.simulation.system.replicas import MOST_DRAFT_TOKENS, TOKENIZER
from tests.simulation.system.watched import CountedDraft, CountedDrafts, CountedStreams, CountedTarget, behind
from tests.simulation.system.wire import SimChannel

if TYPE_CHECKING:
    from tests.simulation.world import World


class SimClock:
    """The clock of one process; it may jump forward."""

    def __init__(self) -> None:
        self.ahead_ns = 0
        self._loop = running_loop()

    def now_ns(self) -> int:
        return round(self._loop.now_s * SECOND) + self.ahead_ns


def _timeouts(schedule: Schedule) -> Timeouts:
    timing = schedule.timing
    return Timeouts(
        store_ns=int(timing.store_s * SECOND),
        verify_ns=int(timing.verify_s * SECOND),
        draft_ns=int(timing.draft_s * SECOND),
        renew_ns=int(timing.renew_s * SECOND),
        client_ns=int(schedule.client_s * SECOND),
    )


class SimGateway:
    def __init__(self, world: World, address: str) -> None:
        self.address = address
        self.ready = False
        self._world = world
        self._limits = SessionLimits(
            window=world.schedule.window,
            buffer=8,
            credit=world.schedule.credit,
            item_drafts=MOST_DRAFT_TOKENS,
            target_timeout_ns=int(world.schedule.timing.target_s * SECOND),
            max_draft_cooldown_ns=int(settings.MAX_DRAFT_COOLDOWN_S * SECOND),
        )
        self.start()

    def start(self) -> None:
        self.process = Process(self.address)
        self.ready = False
        self.clock = SimClock()
        self.process.call(self._build)
        self.process.spawn(self._get_ready())

    def _build(self) -> None:
        world, schedule = self._world, self._world.schedule
        registry: Any = SimRegistry(world.redis, self.process)
        channel: Any = self._channel
        timeouts = _timeouts(schedule)
        self.store = SimStore(world.redis, self.process, world.ledger)
        self.targets = TargetPool(
            RegisteredAddresses(registry, TARGET_POOL),
            TargetRequirements(TOKENIZER, ["known"], MOST_DRAFT_TOKENS),
            channel,
            self.clock,
            schedule.slow_factor,
            schedule.hedge_quantile,
        )
        self.drafts = CountedDrafts(
            RegisteredAddresses(registry, DRAFT_POOL), TOKENIZER, channel, self.clock, timeouts.draft_ns
        )
        self.drafts.ledger = world.ledger
        self.keeper: VersionKeeper | None = None
        if schedule.versions is not None:
            self.keeper = VersionKeeper(SimVersions(world.redis, self.process), self.drafts)
        self.streams = CountedStreams(
            self.store, self.clock, self._ports_of, letters, self._limits, timeouts, schedule.slots
        )
        self.streams.watch(world.ledger, self.address)
        if self.keeper is not None:
            self.streams.draft_version_of = self.keeper.version_of
        self.grammars = Grammars(VOCABULARY)
        self.streams.own_sources = OwnSources(partial(self.grammars.compiled, FairThreads()))
        records: Any = SimAudits(world.redis, self.process, world.ledger)
        kept_ns = int(settings.FINISHED_TTL_S * SECOND)
        tools = AuditTools(self.targets, self.store, records, self.clock, timeouts.verify_ns, kept_ns)
        self.auditor = Auditor(tools, float(schedule.audits))
        self.streams.on_finished.append(self.auditor.note_finished)

    def _channel(self, address: str) -> SimChannel:
        return SimChannel(self._world.network, self._world.servers, self.process, address)

    def _ports_of(self, stored: StoredSession, session: Session) -> Ports:
        held, looks_up = stored.directory.draft, self._world.schedule.looks_up
        draft = CountedDraft(self.drafts, held, may_look_up=looks_up)
        fingerprint = session.answer.fingerprint or ""
        target = CountedTarget(self.targets, fingerprint, stored.directory.target, draft)
        target.ledger = draft.ledger = self._world.ledger
        return Ports(draft, target, self.clock, self._tally(stored, session, draft))

    def _tally(self, stored: StoredSession, session: Session, draft: CountedDraft) -> SessionTally | None:
        keeper, seen = self.keeper, self._world.versions
        if keeper is None or seen is None:
            return None
        spec, is_new = session.spec, stored.ownership.epoch == 1
        is_canary = keeper.state.split.is_canary(spec.session_id, spec.tenant_salt, spec.workload)
        seen.gave(spec.session_id, keeper.state, is_canary=is_canary, is_new=is_new)
        return keeper.tally(spec, draft, begins=len(stored.tokens) == stored.prompt_len)

    def _serve(self) -> None:
        tokenizer: Any = Letters()
        limits = Limits(default_max_tokens=1, max_draft_tokens=MOST_DRAFT_TOKENS)
        slots = self._world.schedule.slots
        model = ServedModel(
            "sim", self.targets, tokenizer, self.drafts, limits, slots, MOST_DRAFT_TOKENS, "", self.grammars
        )
        observers = RequestObservers(self.clock)
        generation = Generation(self.streams, model, self.clock, ID_SECRET, observers, self.auditor)
        servicer = GenerationServicer(generation)
        http = SimHttp(self._world, self.process, generation)
        served = behind(self._world, self.process, servicer, http.serve)
        self._world.servers[self.address] = Server(self.process, served)

    async def _get_ready(self) -> None:
        while True:
            try:
                await self.targets.start(settings.START_S)
                break
            except TargetUnavailable:
                continue
        await self.drafts.start()
        if self.keeper is not None:
            await self.keeper.start()
        self._serve()
        self.ready = True

    async def drain(self) -> None:
        self.ready = False
        drain_s = self._world.schedule.timing.drain_s
        await GatewayService(self.streams, AsyncExitStack(), drain_s, self.auditor.stop).drain()

    async def _close(self) -> None:
        await self.auditor.close()
        await self.streams.close()
        if self.keeper is not None:
            await self.keeper.close()
        await self.targets.close()
        await self.drafts.close()

    async def check_leaks(self) -> None:
        """Violate a rule if a count, a request or a task is left."""
        ledger = self._world.ledger
        for target in self.targets._replicas.values():
            if target.open_requests or target._rows:
                counted = f"{target.open_requests} items and {target._rows} rows at {target.address}"
                ledger.violate(f"{self.address} counts {counted}, and nothing is there")
        for pool in (self.targets, self.drafts):
            ledger.met.update({f"{pool.role} {why}": count for why, count in pool.move_counts.items()})
        self.process.spawn(self._close())
        await asyncio.sleep(0.5)
        left = [getattr(task.get_coro(), "__qualname__", "a task") for task in self.process.tasks]
        if left:
            ledger.violate(f"{self.address} leaves tasks behind: {left}")

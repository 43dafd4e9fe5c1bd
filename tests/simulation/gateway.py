"""A gateway of the simulation: the real streams, runners, routers and pools, without a socket."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from services.common.registry import DRAFT_POOL, TARGET_POOL
from services.core import events as ev
from services.core.answer import Chunk, NumericsChanged
from services.core.errors import Broken, GalleyError, TargetUnavailable, Unavailable
from services.core.principal import Principal
from services.core.session import SessionLimits
from services.gateway.drafts import Drafts, SessionDraft
from services.gateway.members import Registered
from services.gateway.patience import SECOND, Timeouts
from services.gateway.router import SessionTarget
from services.gateway.runner import Ports
from services.gateway.service import GatewayService
from services.gateway.streams import Streams
from services.gateway.targets import Targets
from tests.simulation.loop import Process
from tests.simulation.redis import SimRegistry, SimStore
from tests.simulation.replicas import MOST_DRAFT_TOKENS, TOKENIZER
from tests.simulation.truth import decode
from tests.simulation.wire import SimChannel

if TYPE_CHECKING:
    from services.core.session import Session
    from services.core.store import StoredSession
    from services.gateway.runner import Item, SessionRunner
    from tests.simulation.client import Asked, ClientCall
    from tests.simulation.world import World

PRINCIPAL = "me"
_MS = 1_000_000
TIMEOUTS = Timeouts(store_ns=2 * SECOND, verify_ns=2 * SECOND, draft_ns=100 * _MS, renew_ns=2 * SECOND)
MAX_STREAMS = 3
DRAIN_S = 0.5
"""How long what drains has before it is killed."""


class SimClock:
    """The clock of one process; it may jump, and only forward."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def now_ns(self) -> int:
        """See `services.core.ports.Clock`."""
        return round(asyncio.get_running_loop().time() * SECOND) + self.ahead_ns


class SimGateway:
    """One address of a gateway; each start is a new life of its process."""

    def __init__(self, world: World, address: str, credit: int, window: int) -> None:
        self.address = address
        self.ready = False
        self._world = world
        self._limits = SessionLimits(
            window=window,
            buffer=8,
            credit=credit,
            item_drafts=MOST_DRAFT_TOKENS,
            target_timeout_ns=3 * SECOND,
            max_draft_cooldown_ns=SECOND,
        )
        self.start()

    def start(self) -> None:
        """A new process, which knows nothing."""
        self.process = Process(self.address)
        self.ready = False
        self.clock = SimClock()
        self.process.call(self._build)
        self.process.spawn(self._get_ready())

    def _build(self) -> None:
        world = self._world
        registry: Any = SimRegistry(world.redis, self.process)
        channel: Any = self._channel
        self.store = SimStore(world.redis, self.process, world.ledger)
        self.targets = Targets(
            Registered(registry, TARGET_POOL), TOKENIZER, channel, self.clock, MOST_DRAFT_TOKENS
        )
        self.drafts = Drafts(
            Registered(registry, DRAFT_POOL), TOKENIZER, channel, self.clock, TIMEOUTS.draft_ns
        )
        self.streams = Streams(
            self.store, self.clock, self._ports_of, decode, self._limits, TIMEOUTS, MAX_STREAMS
        )

    def _channel(self, address: str) -> SimChannel:
        return SimChannel(self._world.network, self._world.servers, self.process, address)

    def _ports_of(self, stored: StoredSession, session: Session) -> Ports:
        target = SessionTarget(self.targets, session.answer.fingerprint or "", stored.directory.target)
        return Ports(SessionDraft(self.drafts, stored.directory.draft), target, self.clock)

    async def _get_ready(self) -> None:
        """As a supervisor does: start again until there is a target."""
        while True:
            try:
                await self.targets.start(5.0)
                break
            except TargetUnavailable:
                continue
        await self.drafts.start()
        self.ready = True

    # ------------------------------------------------------------------------------- a stream --

    async def serve(self, call: ClientCall, asked: Asked) -> None:
        """What the servicer does with a Generate or a Resume."""
        end: GalleyError | ev.End
        try:
            with self.streams.admit(Principal(PRINCIPAL), 0):
                runner = await self._runner(asked)
                with self.streams.running(runner):
                    end = await self._run(runner, call)
        except GalleyError as error:
            end = error
        except Exception as error:  # noqa: BLE001  # as the outermost guard of a call
            self._world.ledger.violate(f"{self.address}: a stream raised {error!r}")
        call.end(end)

    async def _run(self, runner: SessionRunner, call: ClientCall) -> ev.End:
        sender = _Sender(self._world, self.process, runner.session.spec.session_id, call)
        end = await runner.run(sender.send)
        if isinstance(end.error, Broken):
            self._world.ledger.violate(f"{self.address}: {end.error}")
        return end

    async def _runner(self, asked: Asked) -> SessionRunner:
        deadline_ns = None if asked.within_s is None else self.clock.now_ns() + int(asked.within_s * SECOND)
        if not self.ready:
            raise Unavailable("this gateway is not ready")
        if asked.resume_at is None:
            return await self.streams.create(asked.spec, PRINCIPAL, asked.body_hash, deadline_ns)
        return await self.streams.claim(
            asked.spec.session_id, PRINCIPAL, asked.resume_at, asked.seen_hash, deadline_ns
        )

    async def abort(self, call: ClientCall, session_id: str) -> None:
        """What the servicer does with an Abort."""
        try:
            await self.streams.abort(session_id, PRINCIPAL, None)
        except GalleyError as error:
            call.end(error)
        else:
            call.end(ev.End())

    # ---------------------------------------------------------------------------- at the end --

    async def drain(self) -> None:
        """As the service does when it is told to stop."""
        self.ready = False
        await GatewayService(self.streams, AsyncExitStack(), DRAIN_S).drain()

    async def close(self) -> None:
        """As the service closes once it has drained."""
        await self.targets.close()
        await self.drafts.close()


class _Sender:
    """Checks what a runner sends against the log, then gives it to the call."""

    def __init__(self, world: World, process: Process, session_id: str, call: ClientCall) -> None:
        self._world = world
        self._process = process
        self._session_id = session_id
        self._call = call
        self._told: int | None = None

    async def send(self, item: Item) -> None:
        """Returns when the client's transport has room again."""
        if not self._process.alive:
            return
        if isinstance(item, NumericsChanged):
            self._told = item.index
        elif isinstance(item, Chunk):
            told = self._told == item.index
            self._world.ledger.streamed(self._session_id, item.index, item.tokens, told=told)
        await self._call.push(item)

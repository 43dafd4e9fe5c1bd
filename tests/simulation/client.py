"""Clients of the simulation: each wants one answer, resumes where it may, and checks all that it is told."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.core.answer import NumericsChanged, Reason
from services.core.content import prefix_hash
from services.core.errors import Fenced, GalleyError, LogLost, Unavailable, UnknownSession
from services.core.events import End
from tests.simulation.loop import Process
from tests.simulation.network import Connection
from tests.simulation.truth import text_of

if TYPE_CHECKING:
    from services.core.answer import SessionSpec
    from services.gateway.runner import Item
    from tests.simulation.gateway import SimGateway
    from tests.simulation.network import Network
    from tests.simulation.schedule import Wanted
    from tests.simulation.world import World

_ROOM = 2
"""Items that a transport takes before its reader has."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 0.8


@dataclass(frozen=True, slots=True)
class Asked:
    """A Generate, or a Resume from output token `resume_at` on; `within_s` is its deadline."""

    spec: SessionSpec
    body_hash: bytes
    resume_at: int | None = None
    seen_hash: bytes = b""
    within_s: float | None = None


class ClientCall(Connection):
    """A stream from a gateway to a client, with flow control."""

    def __init__(self, network: Network, client: Process, gateway: SimGateway) -> None:
        super().__init__(network, client, gateway.address)
        self._gateway = gateway
        self._items: asyncio.Queue[Item | End | GalleyError] = asyncio.Queue()
        self._room = asyncio.Semaphore(_ROOM)
        self._handler: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------- the near end --

    def begin(self, asked: Asked | str) -> None:
        """Generate or Resume; or, of a session's id, Abort."""
        self.send(lambda: self._accept(asked), forth=True)

    async def next(self) -> Item | End | GalleyError:
        """What comes next; what ends the call is the last."""
        item = await self._items.get()
        self.send(self._room.release, forth=True)
        return item

    def leave(self) -> None:
        """The client goes: the gateway is told by the network."""
        self.send(self._stop, forth=True)
        self._network.connections.pop(id(self), None)

    # -------------------------------------------------------------------------- the far end --

    def _accept(self, asked: Asked | str) -> None:
        gateway = self._gateway
        if not gateway.process.alive:
            self.give_up("connection refused")
            return
        self.server = gateway.process
        work = gateway.abort(self, asked) if isinstance(asked, str) else gateway.serve(self, asked)
        self._handler = gateway.process.spawn(work)

    async def push(self, item: Item) -> None:
        """Send, when there is room."""
        await self._room.acquire()
        self.send(lambda: self._items.put_nowait(item), forth=False)

    def end(self, end: End | GalleyError) -> None:
        """Nothing follows."""
        self.send(lambda: self._last(end), forth=False)

    def _last(self, end: End | GalleyError) -> None:
        self._items.put_nowait(end)
        self.close()

    def _stop(self) -> None:
        if self._handler is not None:
            self._handler.cancel()
        self.close()

    def broke(self, reason: str) -> None:
        """The client is told; the gateway gives the stream up."""
        self._items.put_nowait(Unavailable(reason))
        if self._handler is not None:
            self._handler.cancel()


class SimClient:
    """Wants the answer to `spec`; the schedule tells it to stall, to leave, to abort, to go elsewhere."""

    def __init__(self, world: World, name: str, wanted: Wanted, *, yields: bool = False) -> None:
        self.process = Process(name)
        self.spec = wanted.spec
        self.seen: list[int] = []
        self.done = False
        self.stalled_until = 0.0
        self.began_s = 0.0
        self.wanted = wanted
        self._yields = yields
        self._world = world
        self._call: ClientCall | None = None
        self._started = False
        self._turn = 0
        self._at = 0

    def start(self) -> None:
        """Ask, and go on asking until the answer has ended."""
        self.process.spawn(self._run())

    def go_elsewhere(self) -> None:
        """Its connection breaks; it resumes at the next gateway."""
        if self._call is not None:
            self._call.give_up("the client's network changed")

    def leave(self) -> None:
        """It goes, and does not come back."""
        self.done = True
        if self._call is not None:
            self._call.leave()
        self.process.crash()

    def abort(self) -> None:
        """End the session for good."""
        self._world.ledger.aborting(self.spec.session_id)
        self.process.spawn(self._abort())

    async def _abort(self) -> None:
        while not self.done:
            call = self._open()
            call.begin(self.spec.session_id)
            end = await call.next()
            if isinstance(end, End):
                return
            await asyncio.sleep(_LAST_PAUSE_S)

    def _open(self) -> ClientCall:
        self._turn += 1
        gateways = self._world.gateways
        return ClientCall(self._world.network, self.process, gateways[self._turn % len(gateways)])

    async def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self.done:
            before = len(self.seen)
            await self._attempt()
            pause_s = _FIRST_PAUSE_S if len(self.seen) > before else min(2 * pause_s, _LAST_PAUSE_S)
            if not self.done:
                await asyncio.sleep(pause_s)

    def _asked(self) -> Asked:
        resume_at = len(self.seen) if self._started else None
        seen_hash = prefix_hash(self.seen) if self._started and self.wanted.checks_seen else b""
        return Asked(self.spec, b"body", resume_at, seen_hash, self.wanted.within_s)

    async def _attempt(self) -> None:
        """One call, to its end."""
        self._at = len(self.seen) if self._started else 0
        self.began_s = asyncio.get_running_loop().time()
        call = self._call = self._open()
        call.begin(self._asked())
        while not isinstance(item := await call.next(), End | GalleyError):
            await self._wait_if_stalled()
            if not self.done:  # what had come before it gave up is of no more interest
                self._take(item)
        self._call = None
        error = item.error if isinstance(item, End) else item
        if error is not None:
            self._world.ledger.met[f"client: {type(error).__name__}"] += 1
            self._world.ledger.note(f"{self.process.name} was told {type(error).__name__}: {error}")
            self._note_error(error)
        elif isinstance(item, End) and not self.done:
            self._conclude(item)

    async def _wait_if_stalled(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self.stalled_until > now_s:
            await asyncio.sleep(self.stalled_until - now_s)

    def _take(self, item: Item) -> None:
        """An index neither skipped nor twice, and never another token than before."""
        ledger, name = self._world.ledger, self.process.name
        self._started = True
        if isinstance(item, NumericsChanged):
            return
        if item.index != self._at:
            ledger.violate(f"{name}: index {item.index} where {self._at} was due")
        for token in item.tokens:
            if self._at == len(self.seen):
                self.seen.append(token)
            elif self.seen[self._at] != token:
                self._contradicted(f"token {self._at} was {self.seen[self._at]}, is {token}")
                return
            self._at += 1
        if item.text != text_of(self.spec, item.index, item.tokens):
            ledger.violate(f"{name}: text {item.text!r} of {item.tokens}")
        told = [-entry.logprob for entry in item.logprobs]
        if told != [float(token) for token in item.tokens] * (self.spec.logprobs is not None):
            ledger.violate(f"{name}: logprobs {told} of {item.tokens}")

    def _contradicted(self, what: str) -> None:
        """What is made anew after all was lost may be another answer; the client sees it, and gives up."""
        self._world.data_lost(self, what)
        self.go_elsewhere()
        self.done = True

    def _note_error(self, error: GalleyError) -> None:
        if isinstance(error, UnknownSession):
            self._world.forgotten(self)
            self._started = False  # the request itself is all that is left; it makes the same answer
        elif isinstance(error, LogLost):
            self._world.data_lost(self, str(error))
            self.done = True
        elif isinstance(error, Fenced) and self._yields:
            self.done = True

    def _conclude(self, end: End) -> None:
        assert end.ending is not None
        aborted = end.ending.reason is Reason.ABORTED
        self._world.ledger.has_ended(self.spec.session_id, self.seen, aborted=aborted)
        reason = end.ending.reason
        self._world.ledger.note(f"{self.process.name} has all {len(self.seen)}: {reason.value}")
        self.done = True

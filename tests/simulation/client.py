"""Clients of the simulation: the product's client, and an application that reads one answer and checks it.

The application forgives nothing: an error that the client raises ends its stream, and `verdicts.py` decides
whether the faults in force allow it. Some applications come back to their stream later, as a person would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import grpc

from galley.client.client import AsyncClient
from galley.client.errors import GalleyRpcError
from galley.client.options import Retries
from galley.client.streams import NO_RETRIES, AsyncStream
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.simulation.schedule import PlannedSession
from tests.simulation.system.http_client import HttpStub
from tests.simulation.system.loop import Process
from tests.simulation.system.wire import SimChannel
from tests.simulation.truth import text_of

if TYPE_CHECKING:
    from tests.simulation.world import World

_LONGEST_WAIT_S = 5.0
"""Longest time that an application waits before it comes back; longer retry delays are cut to it."""
_FINAL = frozenset({grpc.StatusCode.DATA_LOSS, grpc.StatusCode.FAILED_PRECONDITION})
"""Statuses after which nobody comes back."""


def client_of(
    world: World,
    process: Process,
    principal: str,
    retries: Retries,
    ids: dict[int, str] | None = None,
    *,
    as_response: bool = False,
) -> AsyncClient:
    """Return a client by gRPC, or by HTTP if it has `ids`: those of events by the index that follows them."""
    addresses = [gateway.address for gateway in world.gateways]
    client = AsyncClient(addresses, retries=retries)
    key = (("authorization", f"Bearer {principal}"),)
    for address in addresses:
        channel: Any = SimChannel(world.network, world.servers, process, address, key)
        stub: Any = rpc.GenerationStub(channel)
        if ids is not None:
            stub = HttpStub(channel, stub.Abort, ids, world.ledger, as_response=as_response)
        stub.Delete = channel.unary_unary("/galley.v1.Generation/Delete")
        client._stubs.append(stub)
    return client


class SimClient:
    """An application; `before` is one whose stream it continues, or whose answer it reads again."""

    def __init__(
        self, world: World, name: str, planned: PlannedSession, before: SimClient | None = None
    ) -> None:
        self.process = Process(name)
        self.spec = planned.spec
        self.seen: list[int] = [] if before is None else list(before.seen)
        self.done = False
        self.left = False
        self.stalled_until = 0.0
        self.heard_s = 0.0
        """When it last got tokens, or opened its stream."""
        self.opened_s = 0.0
        self.went_elsewhere = False
        """True if it cannot read any stream that it has opened so far, nor tell a gateway so."""
        self.resumes = False
        """True if its stream continues a session that was there before."""
        self.planned = planned
        self.error: GalleyRpcError | None = None
        """The error that ended its last stream."""
        self._world = world
        self._ids: dict[int, str] = {} if before is None else dict(before._ids)
        ids = self._ids if planned.by_http else None
        self._client = client_of(
            world, self.process, planned.principal, planned.retries, ids, as_response=planned.as_response
        )
        self.stream: AsyncStream | None = None if before is None else before.stream
        self._finished: pb.Finished | None = None
        self._at = 0

    def start(self) -> None:
        """Read the answer, as often as the plan allows."""
        self.process.spawn(self._run())

    def go_elsewhere(self) -> None:
        self.went_elsewhere = True
        self._world.network.move(self.process.name)

    def leave(self) -> None:
        self.done = self.left = True
        if self.stream is not None:
            self.stream.cancel()
        self.process.crash()

    def resume_wrongly(self, next_index: int) -> None:
        """Have somebody of this principal send a Resume of the session that must be refused."""
        intruder = Process(f"intruder of {self.process.name}")
        intruder.spawn(self._resume_wrongly(intruder, next_index))

    async def _resume_wrongly(self, intruder: Process, next_index: int) -> None:
        client = client_of(self._world, intruder, self.planned.principal, NO_RETRIES)
        ledger, other_answer = self._world.ledger, b"?" * 16
        try:
            async for event in client.resume(self.spec.session_id, next_index, other_answer):
                if event.WhichOneof("event") != "started":
                    ledger.violate(f"{intruder.name}: its Resume at {next_index} is served")
        except GalleyRpcError as error:
            ledger.met[f"wrong Resume: {error.code.name}"] += 1

    def abort(self) -> None:
        self._world.ledger.aborting(self.spec.session_id)
        self.process.spawn(self._abort())

    async def _abort(self) -> None:
        client = client_of(self._world, self.process, self.planned.principal, self.planned.retries)
        try:
            await client.abort(self.spec.session_id)
        except GalleyRpcError as error:
            self._world.verdicts.abort_failed(self, error)

    def delete(self) -> None:
        self._world.ledger.aborting(self.spec.session_id)
        self.process.spawn(self._delete())

    async def _delete(self) -> None:
        """Delete the session, and then try to read it: the ledger checks what is streamed."""
        client = client_of(self._world, self.process, self.planned.principal, self.planned.retries)
        request = pb.AbortRequest(session_id=self.spec.session_id)

        def delete(stub: Any, left_s: float | None, key: Any) -> Any:
            return stub.Delete(request, timeout=left_s, metadata=key)

        try:
            await client._first_response(delete, None)
        except GalleyRpcError as error:
            self._world.verdicts.abort_failed(self, error)
            return
        reader = Process(f"reader of {self.process.name}")
        reader.spawn(self._read_deleted(reader))

    async def _read_deleted(self, reader: Process) -> None:
        client = client_of(self._world, reader, self.planned.principal, NO_RETRIES)
        try:
            async for _ in client.resume(self.spec.session_id, 0):
                pass  # somebody has made it again
        except GalleyRpcError as error:
            self._world.ledger.met[f"read after its deletion: {error.code.name}"] += 1

    async def _run(self) -> None:
        await self._read()
        for _ in range(self.planned.returns):
            error = self.error
            if self.done or error is None or error.code in _FINAL:
                break
            pause_s = max(self.planned.return_s, error.retry_after_s or 0.0)
            await asyncio.sleep(min(pause_s, _LONGEST_WAIT_S))
            await self._read()
        self.done = True

    def _open(self) -> AsyncStream:
        planned, before = self.planned, self.stream
        self.resumes = before is not None and bool(before.session_id)
        if before is None or not before.session_id:
            self._at = 0
            return self._client.stream(planned.spec.prompt, **planned.options())
        point = before.resume_from()
        self._at = point.next_index
        if planned.checks_seen:
            return self._client.resume_stream(before, timeout_s=planned.within_s)
        return self._client.resume(point.session_id, point.next_index, timeout_s=planned.within_s)

    async def _read(self) -> None:
        self._finished = self.error = None
        self.opened_s = self.heard_s = asyncio.get_running_loop().time()
        stream = self.stream = self._open()
        try:
            async for event in stream:
                await self._linger()
                if not self.done:
                    self._take(event)
                if self.done:
                    stream.cancel()
                    return
        except GalleyRpcError as error:
            self.error = error
            ledger, name = self._world.ledger, self.process.name
            ledger.note(f"{name} gets {error}")
            if self._finished is not None:
                ledger.violate(f"{name}: {error.code.name} after the end of its answer")
            self._world.verdicts.raised(self, error)
            if error.code is grpc.StatusCode.NOT_FOUND:
                self.stream = None
        else:
            self._conclude()

    async def _linger(self) -> None:
        now_s = asyncio.get_running_loop().time()
        pause_s = max(self.stalled_until - now_s, self.planned.pause_s)
        if pause_s > 0.0:
            await asyncio.sleep(pause_s)

    def _take(self, event: pb.StreamEvent) -> None:
        ledger, name = self._world.ledger, self.process.name
        if self._finished is not None:
            ledger.violate(f"{name}: a {event.WhichOneof('event')} after the end of its answer")
        match event.WhichOneof("event"):
            case "started":
                if event.started.session_id != self.spec.session_id:
                    ledger.violate(f"{name}: has session {event.started.session_id}")
            case "chunk":
                self._take_chunk(event.chunk)
            case "finished":
                self._finished = event.finished
                for source in event.finished.speculation.sources:
                    ledger.met[f"accepted of source {source.source}"] += source.accepted
                by_rank = event.finished.speculation.accepted_by_rank
                ledger.met["accepted beside the likeliest"] += sum(by_rank[1:])
                if self.planned.breaks_off:
                    self.go_elsewhere()
            case _:
                pass

    def _take_chunk(self, chunk: pb.Chunk) -> None:
        ledger, name = self._world.ledger, self.process.name
        self.heard_s = asyncio.get_running_loop().time()
        if chunk.index != self._at:
            ledger.violate(f"{name}: index {chunk.index} where {self._at} was due")
        for token in chunk.token_ids:
            if self._at == len(self.seen):
                self.seen.append(token)
            elif self.seen[self._at] != token:
                self._lost(f"token {self._at} was {self.seen[self._at]}, is {token}")
                return
            self._at += 1
        if chunk.text != text_of(self.spec, chunk.index, chunk.token_ids):
            ledger.violate(f"{name}: text {chunk.text!r} of {chunk.token_ids}")
        values = [-entry.logprob for entry in chunk.logprobs]
        if values != [float(token) for token in chunk.token_ids] * (self.spec.logprobs is not None):
            ledger.violate(f"{name}: logprobs {values} of {chunk.token_ids}")

    def _lost(self, what: str) -> None:
        self._world.verdicts.data_lost(self, what)
        self.go_elsewhere()
        self.done = True

    def _conclude(self) -> None:
        ledger, name, finished = self._world.ledger, self.process.name, self._finished
        if finished is None:
            ledger.violate(f"{name}: its stream ended before its answer")
        if self.planned.checks_seen and not ledger.was_logged(self.spec.session_id, self.seen):
            ledger.violate(f"{name}: what it has of its answer mixes two answers")
        aborted = finished.reason == pb.Finished.REASON_ABORTED
        ledger.has_ended(self.spec.session_id, self.seen, aborted=aborted)
        ledger.note(f"{name} has all {len(self.seen)}: {pb.Finished.Reason.Name(finished.reason)}")
        self.done = True


class Stranger:
    """A principal who knows the id of another's session."""

    def __init__(self, world: World, planned: PlannedSession) -> None:
        self._world = world
        self._planned = planned
        self._process = Process(f"stranger to {planned.client}")

    def start(self) -> None:
        self._process.spawn(self._run())

    async def _run(self) -> None:
        others = (it.name for it in self._world.schedule.principals if it.name != self._planned.principal)
        client = client_of(self._world, self._process, next(others), NO_RETRIES)
        await self._must_fail(self._read(client))
        await self._must_fail(client.abort(self._planned.spec.session_id))

    async def _read(self, client: AsyncClient) -> None:
        async for _ in client.resume(self._planned.spec.session_id, 0):
            return

    async def _must_fail(self, call: Awaitable[None]) -> None:
        name = self._process.name
        try:
            await call
        except GalleyRpcError as error:
            self._world.verdicts.stranger_failed(name, error)
        else:
            self._world.ledger.violate(f"{name} reads or ends the session of another principal")

"""Streams, their slots and what pumps them: slow clients, ends that nobody reads, calls to Abort."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from galley.core.admission.admission import ANONYMOUS, ANONYMOUS_NAME, Principal, PrincipalLimits
from galley.core.answer.answer import Answer, Chunk, Ending, Reason, SessionSpec, encode_spec
from galley.core.content import prefix_hash
from galley.core.errors import Fenced, GalleyError, LogLost, Overloaded, Unavailable, UnknownSession
from galley.core.records import TokenRecord, encode_records
from galley.core.session import events as ev
from galley.core.session.machine import Session, SessionLimits
from galley.core.store import NewSession, OwnerChanged, Ownership, StoredSession
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.clock import SECOND, MonotonicClock, Timeouts
from services.gateway.generation import Generation
from services.gateway.request.validate import ResumeSpec
from services.gateway.service import GatewayService
from services.gateway.servicer import GenerationServicer
from services.gateway.session.outbox import Outbox
from services.gateway.session.replay import SPEC_FIELD
from services.gateway.session.runner import Ports, SessionRunner
from services.gateway.session.streams import AnswerStream, Streams
from services.gateway.telemetry.observer import RequestObservers
from tests.fakes.owners import create, hashes_of
from tests.fakes.resumes import resumed
from tests.fakes.session_ports import SPEC, TOKEN, ManualClock, NoDraft, PortTarget
from tests.fakes.store import MemoryStore

DONE = ev.End(ending=Ending(Reason.LENGTH))
CHUNKS = tuple(Chunk(index, (5,), "x", from_draft=(False,)) for index in range(3))


class Scripted:
    def __init__(self, chunks: Sequence[Chunk], end: ev.End, client_s: float) -> None:
        self.outbox = Outbox(MonotonicClock(), round(client_s * SECOND), self._chunks, lambda _: None)
        self.session = Session(Answer(SPEC, lambda tokens: "x" * len(tokens)), SessionLimits())
        self.owner = Ownership("s", 1, b"nonce")
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self._items = chunks
        self._end = end

    def _chunks(self, start: int, end: int) -> Iterator[Chunk]:
        return iter(self._items[start:end])

    async def run(self) -> ev.End:
        try:
            self.outbox.put(0, len(self._items))
            await self.outbox.flush()
            return self._end
        finally:
            await self.may_stop.wait()


@dataclass
class Call:
    status: grpc.StatusCode | None = None
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    over: list[Callable[[object], None]] = field(default_factory=list)

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self.over.append(callback)

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, code: grpc.StatusCode, _details: str, _trailing: object) -> None:
        self.status = code
        self.aborted.set()
        raise grpc.aio.AbortError


class Served:
    def __init__(self, end: ev.End, client_s: float, chunks: Sequence[Chunk] = CHUNKS) -> None:
        self.runner = Scripted(chunks, end, client_s)
        self.call = Call()
        self.streams = Streams(
            MemoryStore(), MonotonicClock(), cast("Any", None), str, SessionLimits(), Timeouts(), 1
        )

    async def read(self, pause_s: float) -> int:
        count = 0
        request, context = pb.ResumeRequest(), cast("Any", self.call)
        with (
            RequestObservers(MonotonicClock()).stream(request, context, "tiny", "") as observer,
            self.streams.admit(ANONYMOUS) as slot,
        ):
            observer.opened(self.runner.session, StoredSession(self.runner.owner, "me", {}, 3, [1, 2, 3]), 0)
            runner = cast("SessionRunner", self.runner)
            answer = AnswerStream(runner, cast("Any", self.call), self.streams, slot)
            try:
                more = True
                while more:
                    more = not isinstance(await runner.outbox.next(), ev.End)
                    await asyncio.sleep(pause_s)
                    count += 1
            finally:
                answer.leave()
        for callback in self.call.over:
            callback(None)
        return count


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Fenced("s"), grpc.StatusCode.FAILED_PRECONDITION),
        (LogLost("other tokens"), grpc.StatusCode.DATA_LOSS),
        (Overloaded("full", 1.0), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (None, grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_an_unread_end_sets_the_status_of_the_call(
    error: GalleyError | None, code: grpc.StatusCode
) -> None:
    served = Served(DONE if error is None else ev.End(error=error), client_s=0.2, chunks=CHUNKS[:1])
    with capture_logs() as logs:
        reading = asyncio.ensure_future(served.read(pause_s=60))
        await asyncio.wait({reading})
        await served.streams.wait_idle()
        await served.call.aborted.wait()
    assert reading.cancelled()
    assert served.call.status is code
    [line] = logs
    assert (line["event"], line["status"]) == ("call finished", code.name.lower())
    assert error is None or line["error"] == str(error)


async def test_stream_end_waits_for_a_reading_client() -> None:
    served = Served(DONE, client_s=1.0)
    assert await asyncio.wait_for(served.read(pause_s=0.45), 10) == len(CHUNKS) + 1
    assert served.call.status is None


async def test_a_place_is_free_once_its_session_has_stopped() -> None:
    served = Served(DONE, client_s=60)
    served.runner.may_stop.clear()
    reading = asyncio.ensure_future(served.read(pause_s=60))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading})
    waiting = asyncio.ensure_future(served.streams.wait_idle())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    served.runner.may_stop.set()
    async with asyncio.timeout(10):
        await waiting
    with served.streams.admit(ANONYMOUS):
        pass


SESSION = "5e" * 16


async def test_a_session_without_client_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.gateway.generation.caller", lambda: ANONYMOUS)
    store, clock, target = MemoryStore(), MonotonicClock(), PortTarget()
    target.may_answer.clear()
    spec = replace(SPEC, session_id=SESSION, continue_without_client=True)
    fields = {SPEC_FIELD: encode_spec(spec)}
    await create(store, NewSession(SESSION, ANONYMOUS_NAME, b"body", fields, spec.prompt))
    ports = Ports(NoDraft(), target, clock)
    limits = SessionLimits(credit=0)
    streams = Streams(
        store, clock, lambda _stored, _session: ports, lambda ids: "x" * len(ids), limits, Timeouts(), 1
    )
    servicer = GenerationServicer(
        Generation(streams, cast("Any", _Model), clock, b"secret", RequestObservers(clock), cast("Any", None))
    )
    finished: list[tuple[int, str, str]] = []

    def note(session: Session, stored: StoredSession, principal: Principal) -> None:
        finished.append((session.answer.output_len, stored.ownership.session_id, principal.name))

    streams.on_finished.append(note)
    events = servicer.Resume(pb.ResumeRequest(session_id=SESSION), cast("Any", Call()))
    assert (await anext(events)).event.HasField("started")
    await cast("Any", events).aclose()
    idle = asyncio.ensure_future(streams.wait_idle())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not idle.done()
    target.may_answer.set()
    with capture_logs() as logs:
        async with asyncio.timeout(10):
            await idle
    ended = [line for line in logs if line["event"] == "session finished after its client left"]
    assert [line["error"] for line in ended] == [None]
    assert finished == [(spec.max_position - len(spec.prompt), SESSION, ANONYMOUS_NAME)]
    with streams.admit(ANONYMOUS):
        pass


class _Model:
    name = "tiny"

    @staticmethod
    def name_of(_spec: SessionSpec) -> str:
        return "tiny"


class Takeover:
    """A session that a rival owns, and a gateway that is called for it."""

    def __init__(self, spec: SessionSpec = SPEC) -> None:
        self.spec = spec
        self.clock = ManualClock()
        self.set_back_s = 0.0
        self.store = MemoryStore(clock=lambda: self.clock.now / SECOND - self.set_back_s)
        self.target = PortTarget()
        ports = Ports(NoDraft(), self.target, self.clock)
        self.streams = Streams(self.store, self.clock, lambda *_: ports, str, SessionLimits(), Timeouts(), 1)

    async def rival(self) -> Ownership:
        """Create the session, or claim it."""
        fields = {SPEC_FIELD: encode_spec(self.spec)}
        return (await create(self.store, NewSession("s", "me", b"body", fields, SPEC.prompt))).ownership

    async def resume(self, next_index: int = 0, seen_hash: bytes = b"") -> Ownership:
        with self.streams.admit(Principal("me")) as slot:
            return (await resumed(self.streams, slot, ResumeSpec("s", next_index, seen_hash))).log.owner


async def test_a_call_replaces_no_owner_that_claimed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has left for that owner's gateway, which this gateway may not have noticed."""
    world = Takeover()
    first = await world.rival()
    read = world.store.read

    async def read_late(session_id: str, principal: str) -> StoredSession:
        world.clock.now += 2 * SECOND
        await world.rival()
        return await read(session_id, principal)

    with monkeypatch.context() as late:
        late.setattr(world.store, "read", read_late)
        with pytest.raises(OwnerChanged):
            await world.resume()
    assert (await read("s", "me")).ownership.epoch == first.epoch + 1
    world.clock.now += SECOND
    assert (await world.resume()).epoch == first.epoch + 2, "the next call is newer"


async def test_a_call_that_waited_for_its_budget_is_as_old_as_it_is() -> None:
    world = Takeover()
    with world.streams.admit(Principal("me")) as slot:
        world.clock.now += 2 * SECOND  # as long as the store cannot tell what is left of the budget
        owner = await world.rival()
        with pytest.raises(OwnerChanged):
            await world.streams.create(slot, world.spec, b"body", None)
    assert (await world.store.read("s", "me")).ownership == owner


async def test_a_store_whose_clock_was_set_back_does_not_lock_sessions() -> None:
    world = Takeover()
    first = await world.rival()
    world.set_back_s = 3600.0
    assert (await world.resume()).epoch == first.epoch + 1


async def test_an_index_beyond_the_log_waits_for_an_owner_that_writes() -> None:
    """The store may have lost tokens, which their owner writes again; or the client is wrong."""
    world = Takeover()
    first = await world.rival()
    with pytest.raises(Unavailable, match="resume again"):
        await world.resume(1)
    assert (await world.store.read("s", "me")).ownership == first
    world.clock.now += 3 * SECOND
    assert (await world.resume(1)).epoch == first.epoch + 1, "the owner has stopped"


@pytest.mark.parametrize("next_index", [1, 2])
async def test_other_tokens_up_to_the_end_of_the_log_are_refused_before_the_claim(next_index: int) -> None:
    world = Takeover()
    owner = await world.rival()
    log, tokens = [*SPEC.prompt], (5, 6)
    meta = encode_records([TokenRecord(), TokenRecord()])
    await world.store.commit(owner, len(log), tokens, meta, hashes_of(log, tokens))
    with pytest.raises(LogLost, match="not the one whose first tokens the client has seen"):
        await world.resume(next_index, prefix_hash([*tokens[: next_index - 1], 7]))
    assert (await world.store.read("s", "me")).ownership == owner
    assert (await world.resume(next_index, prefix_hash(tokens[:next_index]))).epoch == owner.epoch + 1


async def test_a_draining_gateway_hands_its_sessions_over_after_a_round() -> None:
    world = Takeover(replace(SPEC, max_position=2000))
    await world.rival()
    async with asyncio.timeout(20):
        with world.streams.admit(Principal("me")) as slot:
            runner = await resumed(world.streams, slot, ResumeSpec("s", 0, b""))
            runner.outbox.discard()
            with world.streams.running(runner):
                gateway = GatewayService(world.streams, AsyncExitStack(), drain_timeout_s=0.0)
                draining = asyncio.create_task(gateway.drain())
                end = await runner.run()
        await draining
    assert isinstance(end.error, Unavailable), "its client can resume elsewhere"
    log = world.store.log("s")
    assert log == [*SPEC.prompt, *[TOKEN] * world.target.answered], "what was confirmed is logged"
    assert world.target.answered == len(world.target.verifications), "the round under way is finished"
    assert len(log) < 2000


async def test_draining_ends_with_the_last_stream() -> None:
    served, posted = Served(DONE, 1.0), asyncio.Queue[ev.Event]()
    runner = cast("Any", served.runner)
    runner.post = posted.put_nowait
    async with asyncio.timeout(20):
        with served.streams.admit(ANONYMOUS), served.streams.running(runner):
            draining = asyncio.create_task(served.streams.drain(0.0))
            assert await posted.get() == ev.Draining()
            await asyncio.sleep(0)
            assert not draining.done()
        await draining


async def test_a_principal_in_debt_gets_no_slot() -> None:
    streams = Streams(MemoryStore(), MonotonicClock(), cast("Any", None), str, SessionLimits(), Timeouts(), 9)
    alice = Principal("alice", PrincipalLimits(tokens_per_s=0.01, burst_tokens=10))
    with streams.admit(alice) as slot:
        streams.charge(slot, 100)
        with pytest.raises(Overloaded):  # by what the store holds
            await streams.reserve([slot], [1], None)
    with pytest.raises(Overloaded, match="alice has no token budget left"), streams.admit(alice):
        pass
    with streams.admit(Principal("bob", alice.limits)):
        pass
    await streams.close()


NO_SESSION = "00" * 16


class SlowStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.permits = asyncio.Semaphore(0)

    async def abort(self, session_id: str, principal: str, finish: bytes, latest_ms: int) -> None:
        await self.permits.acquire()
        await super().abort(session_id, principal, finish, latest_ms)


async def test_calls_to_abort_are_shared_among_callers() -> None:
    store = SlowStore()
    streams = Streams(store, MonotonicClock(), cast("Any", None), str, SessionLimits(), Timeouts(), 2)

    def aborting(name: str) -> asyncio.Task[None]:
        return asyncio.create_task(streams.abort(NO_SESSION, Principal(name), None))

    alices = {aborting("alice") for _ in range(2)}
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="all 2 calls to Abort"):
        await aborting("bob")
    store.permits.release()
    await asyncio.wait(alices, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(Overloaded, match="alice holds 1 calls to Abort; its share is 1"):
        await aborting("alice")
    bobs = aborting("bob")
    for _ in range(2):
        store.permits.release()
    for call in (*alices, bobs):
        with pytest.raises(UnknownSession):
            await call


async def test_calls_to_abort_and_reads_are_bounded_as_the_callers_streams() -> None:
    store = SlowStore()
    streams = Streams(store, MonotonicClock(), cast("Any", None), str, SessionLimits(), Timeouts(), 9)
    alice = Principal("alice", PrincipalLimits(max_sessions=1))
    aborting = asyncio.create_task(streams.abort(NO_SESSION, alice, None))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="all 1 calls to Abort of alice are in use"):
        await streams.abort(NO_SESSION, alice, None)
    with streams.admit_read(alice):  # a read has a slot of its own
        with (
            pytest.raises(Overloaded, match="all 1 reads of sessions of alice are in use"),
            streams.admit_read(alice),
        ):
            pass
        with pytest.raises(UnknownSession):
            await streams.read(NO_SESSION, alice, None)
    store.permits.release()
    with pytest.raises(UnknownSession):
        await aborting

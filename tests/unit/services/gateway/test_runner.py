"""The shell around the session machine, where only a hair's breadth of time makes the difference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from galley.core.answer.answer import Answer, SessionSpec
from galley.core.errors import Cancelled, ClientStalled
from galley.core.sampling_params import SamplingParams
from galley.core.session import events as ev
from galley.core.session.machine import Session, SessionLimits
from galley.core.session.ports import Replica
from galley.core.store import UNCHANGED, KvDirectory, NewSession, Ownership
from services.gateway.clock import SECOND, MonotonicClock
from services.gateway.session.runner import Ports, SessionRunner
from services.gateway.store.session_log import SessionLog
from services.gateway.timeouts import Timeouts
from tests.fakes.store import MemoryStore

SPEC = SessionSpec("s", (1, 2, 3), SamplingParams(), max_position=6, vocab_size=8)


class Item:
    """A Verification: one token, said by `replica`."""

    def __init__(self, request: ev.Verify, replica: Replica) -> None:
        self.replica = replica
        self.closed = 0
        self._request = request

    async def __aiter__(self) -> AsyncIterator[ev.Verified | ev.CacheMissed | ev.Failed]:
        position = self._request.slice.start + len(self._request.slice.tokens)
        await asyncio.sleep(0)
        yield ev.Verified(self._request.request_id, position, (5,), 0, 0, position, "build")

    def extend(self, request: ev.ExtendVerify) -> None:
        pass

    async def aclose(self) -> None:
        self.closed += 1


class Targets:
    """A TargetPort whose every item is another replica's."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.remaining_ns: list[int | None] = []

    def verify(self, _spec: SessionSpec, request: ev.Verify, remaining_ns: int | None) -> Item:
        self.remaining_ns.append(remaining_ns)
        self.items.append(Item(request, Replica(f"host:{len(self.items)}", "life")))
        return self.items[-1]


class NoDraft:
    """A DraftPort that has nothing to say."""

    replica = None

    async def propose(self, _spec: SessionSpec, request: ev.Propose, _remaining_ns: int | None) -> ev.Failed:
        return ev.Failed(request.request_id, "there is no draft")


class Store(MemoryStore):
    """Remembers what each commit says of the caches."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[KvDirectory] = []

    async def commit(
        self,
        owner: Ownership,
        expected_len: int,
        tokens: Sequence[int],
        meta: bytes,
        directory: KvDirectory = UNCHANGED,
    ) -> int:
        self.said.append(directory)
        return await super().commit(owner, expected_len, tokens, meta, directory)


async def runner_of(
    targets: Targets,
    store: Store,
    deadline_ns: int | None = None,
    client_ns: int = 60 * SECOND,
) -> SessionRunner:
    stored = await store.create(NewSession("s", "me", b"body", {}, SPEC.prompt))
    session = Session(
        Answer(SPEC, lambda tokens: "x" * len(tokens)), replace(SessionLimits(), credit=0, window=8)
    )
    clock, timeouts = MonotonicClock(), Timeouts(client_ns=client_ns)
    log = SessionLog(store, stored, clock, timeouts, clock.now_ns(), deadline_ns)
    return SessionRunner(session, log, Ports(NoDraft(), targets, clock), timeouts, deadline_ns)


async def run(runner: SessionRunner) -> ev.End:
    """Run it for a client that reads all."""

    async def read() -> None:
        while True:
            await runner.outbox.next()

    reader = asyncio.create_task(read())
    try:
        return await runner.run()
    finally:
        reader.cancel()


async def test_an_item_is_given_up_though_its_client_went_before_its_task_began() -> None:
    targets = Targets()
    runner = await runner_of(targets, Store())
    runner.post(ev.Interrupted(Cancelled("the client went away")))
    end = await run(runner)
    assert isinstance(end.error, Cancelled)
    [item] = targets.items
    assert item.closed


async def test_the_directory_names_the_replica_whose_answer_it_was() -> None:
    """Not the one that is asked next, which is chosen before the commit is on its way."""
    targets, store = Targets(), Store()
    await run(await runner_of(targets, store))
    told = [(said.target.replica, said.target.kv_len) for said in store.said if said.target is not None]
    assert told[0] == ("host:0", 3)
    assert len(targets.items) == 3


async def test_what_is_left_of_the_deadline_goes_with_each_verification() -> None:
    """Also where nothing is left: 0 would be none."""
    for left_ns in (5 * SECOND, 0, -SECOND):
        targets = Targets()
        runner = await runner_of(targets, Store(), MonotonicClock().now_ns() + left_ns)
        await run(runner)
        assert targets.remaining_ns
        assert all(told is not None and 0 < told <= max(1, left_ns) for told in targets.remaining_ns)


async def test_a_client_that_does_not_read_ends_the_session_and_not_its_log() -> None:
    store = Store()
    end = await (await runner_of(Targets(), store, client_ns=SECOND // 20)).run()
    assert isinstance(end.error, ClientStalled)
    assert len(store.log("s")) == SPEC.max_position

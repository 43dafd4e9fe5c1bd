"""The runner of a session at the moments where the order of two events decides."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from galley.core.answer.answer import Answer
from galley.core.errors import Cancelled, ClientStalled
from galley.core.session import events as ev
from galley.core.session.machine import Session, SessionLimits
from galley.core.store import NewSession
from services.gateway.clock import SECOND, MonotonicClock, Timeouts
from services.gateway.session.runner import Ports, SessionRunner
from services.gateway.store.session_log import SessionLog
from tests.fakes.owners import create
from tests.fakes.session_ports import SPEC, FaultyStore, NoDraft, PortTarget


async def runner_of(
    targets: PortTarget,
    store: FaultyStore,
    deadline_ns: int | None = None,
    client_ns: int = 60 * SECOND,
) -> SessionRunner:
    stored = await create(store, NewSession("s", "me", b"body", {}, SPEC.prompt))
    session = Session(
        Answer(SPEC, lambda tokens: "x" * len(tokens)), replace(SessionLimits(), credit=0, window=8)
    )
    clock, timeouts = MonotonicClock(), Timeouts(client_ns=client_ns)
    log = SessionLog(store, stored, clock, timeouts, clock.now_ns(), deadline_ns)
    return SessionRunner(session, log, Ports(NoDraft(), targets, clock), timeouts, deadline_ns)


async def run(runner: SessionRunner) -> ev.End:
    async def read() -> None:
        while True:
            await runner.outbox.next()

    reader = asyncio.create_task(read())
    try:
        return await runner.run()
    finally:
        reader.cancel()


async def test_a_verification_is_closed_if_its_client_left_before_its_task_began() -> None:
    targets = PortTarget()
    runner = await runner_of(targets, FaultyStore())
    runner.post(ev.Interrupted(Cancelled("the client went away")))
    end = await run(runner)
    assert isinstance(end.error, Cancelled)
    [verification] = targets.verifications
    assert verification.closed


async def test_directory_names_the_answering_replica() -> None:
    targets, store = PortTarget(moves=True), FaultyStore()
    await run(await runner_of(targets, store))
    named = [(of.target.replica, of.target.kv_len) for of in store.directories if of.target is not None]
    assert named[0] == ("target:0", 3)
    assert len(targets.verifications) == 3


async def test_verification_carries_the_remaining_deadline() -> None:
    for left_ns in (5 * SECOND, 0, -SECOND):
        targets = PortTarget()
        runner = await runner_of(targets, FaultyStore(), MonotonicClock().now_ns() + left_ns)
        await run(runner)
        assert targets.remaining_ns
        assert all(ns is not None and 0 < ns <= max(1, left_ns) for ns in targets.remaining_ns)


async def test_a_client_that_does_not_read_ends_the_session_and_not_its_log() -> None:
    store = FaultyStore()
    end = await (await runner_of(PortTarget(), store, client_ns=SECOND // 20)).run()
    assert isinstance(end.error, ClientStalled)
    assert len(store.log("s")) == SPEC.max_position

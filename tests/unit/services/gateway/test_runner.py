"""The runner of a session at the moments where the order of two events decides."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from galley.core.answer.answer import Answer, SessionSpec
from galley.core.errors import Cancelled, ClientStalled
from galley.core.session import events as ev
from galley.core.session.events import DraftPort
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
    *,
    spec: SessionSpec = SPEC,
    draft: DraftPort | None = None,
    credit: int = 0,
    verify_ns: int = Timeouts().verify_ns,
) -> SessionRunner:
    stored = await create(store, NewSession("s", "me", b"body", {}, spec.prompt))
    session = Session(
        Answer(spec, lambda tokens: "x" * len(tokens)), replace(SessionLimits(), credit=credit, window=8)
    )
    clock, timeouts = MonotonicClock(), Timeouts(client_ns=client_ns, verify_ns=verify_ns)
    log = SessionLog(store, stored, clock, timeouts, clock.now_ns(), deadline_ns)
    return SessionRunner(session, log, Ports(draft or NoDraft(), targets, clock), timeouts, deadline_ns)


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


async def test_a_verification_without_a_response_moves_at_once() -> None:
    targets = PortTarget(moves=True)
    targets.may_answer.clear()
    runner = await runner_of(targets, FaultyStore(), verify_ns=SECOND // 20)
    running = asyncio.create_task(run(runner))
    await targets.has_expired.wait()
    first, second = targets.verifications[:2]  # on a slow machine the second one may expire, too
    assert first.closed
    assert second.replica != first.replica
    targets.may_answer.set()
    assert (await running).error is None


class HangingDraft:
    replica = None

    def __init__(self) -> None:
        self.calls = 0
        self.open = 0

    async def propose(self, _spec: SessionSpec, _request: ev.Propose, _remaining_ns: int | None) -> ev.Failed:
        self.calls += 1
        self.open += 1
        assert self.open == 1, "the one before is cancelled"
        try:
            await asyncio.Event().wait()
        finally:
            self.open -= 1
        raise AssertionError


async def test_a_proposal_that_comes_too_late_is_cancelled() -> None:
    spec, draft = replace(SPEC, k=1, max_position=20), HangingDraft()
    runner = await runner_of(PortTarget(), FaultyStore(), spec=spec, draft=draft, credit=8)
    end = await run(runner)
    assert end.error is None
    assert draft.calls > 2
    assert draft.open == 0


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


async def test_the_end_of_a_session_is_reported_once_the_store_has_it() -> None:
    store = FaultyStore()
    runner = await runner_of(PortTarget(), store)
    states: list[str] = []

    def note() -> None:
        states.append(store._records["s"].state)

    runner.on_finished = note
    assert (await run(runner)).error is None
    assert states == ["finished"]


async def test_whoever_is_told_of_the_end_cannot_fail_the_session() -> None:
    def fail() -> None:
        raise ValueError("a fault of the audit, say")

    runner = await runner_of(PortTarget(), FaultyStore())
    runner.on_finished = fail
    assert (await run(runner)).error is None


async def test_a_session_that_failed_is_not_reported_as_finished() -> None:
    targets = PortTarget()
    runner = await runner_of(targets, FaultyStore())
    runner.on_finished = lambda: pytest.fail("it has not ended")
    runner.post(ev.Interrupted(Cancelled("the client went away")))
    assert (await run(runner)).error is not None

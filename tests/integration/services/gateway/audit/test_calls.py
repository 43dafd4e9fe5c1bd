"""Audits by clients: whose sessions, which verdict, at what price. The target is a fake one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from galley.client.audit import AuditCounts, Verdict
from galley.core.content import prefix_hash
from galley.core.errors import StoreUnavailable
from services.gateway.audit.auditor import Auditor
from services.gateway.audit.records import AuditRecords
from tests.fakes.changed_logs import change
from tests.fakes.redis_servers import Server
from tests.fakes.truth import true_next, true_output
from tests.fakes.waiting import Watch
from tests.fakes.world import MAX_TOKENS, PROMPT_TOKENS, Gateway, World, any_credit, receive, refused
from tests.integration.services.gateway.callers import ALICE, BOB, KeyFile, calling


@pytest.fixture
async def records(world: World) -> AsyncIterator[AuditRecords]:
    """The records of gateways whose pool is the world's own."""
    records = AuditRecords(world.redis_url, world.id)
    yield records
    await records.close()


async def finished(gateway: Gateway) -> str:
    stream = gateway.generate()
    await receive(stream)
    return stream.session_id


@any_credit
async def test_a_session_that_is_computed_again_is_the_same(gateway: Gateway, credit: int) -> None:
    report = await gateway.client.audit(await finished(gateway))
    assert report.verdict is Verdict.SAME
    assert (report.output_tokens, report.compared, report.differing) == (MAX_TOKENS, MAX_TOKENS, 0)
    assert (report.fingerprint, report.deterministic) == ("build-1", True)


async def test_only_finished_sessions_of_the_caller_are_audited(world: World) -> None:
    gateway = await world.gateway(api_keys_file=KeyFile().write(world))
    async with calling(gateway, ALICE) as alice, calling(gateway, BOB) as bob:
        session_id = await finished(alice)
        assert (await refused(bob.client.audit(session_id))).code is grpc.StatusCode.NOT_FOUND
        assert (await refused(alice.client.audit("0" * 32))).code is grpc.StatusCode.NOT_FOUND
        assert (await refused(alice.client.audit(""))).code is grpc.StatusCode.INVALID_ARGUMENT
        stream, _ = await world.held(alice, 1)
        error = await refused(alice.client.audit(stream.session_id))
        assert error.code is grpc.StatusCode.FAILED_PRECONDITION
        assert error.message == f"session {stream.session_id!r} has not finished"
        world.target.gate.open()


async def test_an_audit_is_charged_to_the_callers_budget(world: World) -> None:
    keys = KeyFile(alice=f"tokens_per_s = 0.001\nburst_tokens = {2 * MAX_TOKENS}")
    gateway = await world.gateway(api_keys_file=keys.write(world))
    async with calling(gateway, ALICE) as alice:
        session_id = await finished(alice)
        assert (await alice.client.audit(session_id)).verdict is Verdict.SAME
        assert (await refused(alice.client.audit(session_id))).code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("name", ["an output token is flipped", "the records are gone", "the log is cut"])
async def test_a_log_that_was_changed_is_damaged(
    world: World, shared_store: Server, records: AuditRecords, name: str
) -> None:
    gateway = await world.gateway(pool=world.id)
    session_id = await finished(gateway)
    async with shared_store.raw() as raw:
        await change(raw, session_id, name)
    for _ in range(2):
        report = await gateway.client.audit(session_id)
        assert (report.verdict, report.compared) == (Verdict.DAMAGED, 0)
    assert await records.counts() == AuditCounts(sessions=1, damaged=1)
    assert len(await records.incidents()) == 1
    world.expect_error("audit found an incident")


async def test_an_incident_that_could_not_be_stored_is_stored_by_the_next_audit(
    world: World, shared_store: Server, records: AuditRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await world.gateway(pool=world.id)
    session_id = await finished(gateway)
    async with shared_store.raw() as raw:
        await change(raw, session_id, "an output token is flipped")
    with monkeypatch.context() as away:
        away.setattr(AuditRecords, "add", unavailable)
        assert (await gateway.client.audit(session_id)).verdict is Verdict.DAMAGED
    assert not await records.incidents()
    for _ in range(2):
        assert (await gateway.client.audit(session_id)).verdict is Verdict.DAMAGED
    [incident] = await records.incidents()
    assert incident["session_id"] == session_id
    world.expect_error("audit found an incident")


async def unavailable(*_: object) -> None:
    raise StoreUnavailable("redis")


async def test_an_edited_log_of_a_right_hash_differs_where_it_was_edited(
    world: World, shared_store: Server, records: AuditRecords
) -> None:
    """The tokens after the edit are not those that follow the edited one, so each differs on its own."""
    gateway = await world.gateway(pool=world.id)
    session_id = await finished(gateway)
    tokens = [*PROMPT_TOKENS, *true_output(PROMPT_TOKENS, MAX_TOKENS)]
    edited = len(PROMPT_TOKENS) + 11
    tokens[edited] = (tokens[edited] + 1) % 256
    async with shared_store.raw() as raw:
        [key] = [key async for key in raw.scan_iter(f"galley:sessions:*{{{session_id}}}")]
        await raw.hset(key, "log_hash", prefix_hash(tokens))
        await raw.setrange(key.decode() + ":log", 4 * edited, bytes([tokens[edited], 0, 0, 0]))
    report = await gateway.client.audit(session_id)
    differing = [
        at - len(PROMPT_TOKENS)
        for at in range(len(PROMPT_TOKENS), len(tokens))
        if true_next(tokens[:at]) != tokens[at]
    ]
    assert report.verdict is Verdict.DIFFERS
    assert (report.compared, report.differing) == (MAX_TOKENS, len(differing))
    assert [difference.index for difference in report.differences] == differing[:16]
    assert differing[0] == 11
    first = report.differences[0]
    assert (first.logged, first.computed) == (tokens[edited], true_next(tokens[:edited]))
    assert first.computed_logprob is not None
    assert await records.counts() == AuditCounts(sessions=1, tokens=MAX_TOKENS, differing=len(differing))
    [incident] = await records.incidents()
    assert incident["session_id"] == session_id
    assert incident["differences"][0]["index"] == 11
    assert {name for entry in incident["differences"] for name in entry} == {
        "index",
        "logged_logprob",
        "computed_logprob",
    }
    world.expect_error("audit found an incident")


async def test_no_target_of_the_build_compares_nothing(world: World, records: AuditRecords) -> None:
    gateway = await world.gateway(pool=world.id)
    session_id = await finished(gateway)
    await world.target.stop()
    world.target.fingerprint = "build-2"
    await world.target.start()
    another = await world.gateway(pool=world.id)
    report = await another.client.audit(session_id)
    assert (report.verdict, report.output_tokens, report.compared) == (Verdict.NOT_COMPARED, MAX_TOKENS, 0)
    assert await records.counts() == AuditCounts()


async def test_a_target_that_fails_is_not_a_difference(world: World) -> None:
    gateway = await world.gateway()
    session_id = await finished(gateway)
    world.target.fail(grpc.StatusCode.UNAVAILABLE, 2)
    assert (await gateway.client.audit(session_id)).verdict is Verdict.SAME
    world.target.item_failure = grpc.StatusCode.INTERNAL
    error = await refused(gateway.client.audit(session_id))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert error.message == "no verdict from the target: the logits are not numbers"


async def test_an_aborted_session_is_audited_as_far_as_it_came(world: World) -> None:
    gateway = await world.gateway()
    stream, received = await world.held(gateway, 1)
    await gateway.client.abort(stream.session_id)
    world.target.gate.open()
    await received.listen(stream)
    report = await gateway.client.audit(stream.session_id)
    assert (report.verdict, report.compared) == (Verdict.SAME, len(received.tokens))


async def test_calls_of_one_moment_read_the_totals_once(
    world: World, records: AuditRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await world.gateway(pool=world.id)
    await gateway.client.audit(await finished(gateway))
    reads = 0
    count = AuditRecords.counts

    async def counted(records: AuditRecords) -> AuditCounts:
        nonlocal reads
        reads += 1
        return await count(records)

    monkeypatch.setattr(AuditRecords, "counts", counted)
    totals = await asyncio.gather(*(gateway.client.audit_counts() for _ in range(8)))
    assert {total.tokens for total in totals} == {MAX_TOKENS}
    assert reads == 1


async def test_calls_that_wait_for_the_totals_share_one_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store is away, the last call waits no longer than the first, and one may end by itself."""
    gateway = await world.gateway(pool=world.id)
    reads: list[asyncio.Future[AuditCounts]] = []

    async def never_yet(_: AuditRecords) -> AuditCounts:
        reads.append(asyncio.get_running_loop().create_future())
        return await reads[-1]

    begun, counts = Watch(), Auditor.counts
    calls: list[Auditor] = []

    async def noted(self: Auditor) -> AuditCounts:
        calls.append(self)
        begun.changed()
        return await counts(self)

    async def waiting(number: int) -> list[asyncio.Task[AuditCounts]]:
        """Return calls that have begun to wait."""
        calls.clear()
        tasks = [asyncio.create_task(gateway.client.audit_counts()) for _ in range(number)]
        await begun.until(lambda: len(calls) == number)
        return tasks

    monkeypatch.setattr(Auditor, "counts", noted)
    monkeypatch.setattr(AuditRecords, "counts", never_yet)
    first, *others = await waiting(4)
    first.cancel()
    await asyncio.wait([first])
    await gateway.client.model_info()
    reads[0].set_exception(StoreUnavailable("away"))
    codes = [(await refused(other)).code for other in others]
    assert codes == [grpc.StatusCode.UNAVAILABLE] * 3
    assert len(reads) == 1
    (after,) = await waiting(1)
    await gateway.client.model_info()
    reads[1].set_result(AuditCounts(tokens=5))
    assert (await after).tokens == 5

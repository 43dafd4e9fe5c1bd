"""Audits that a gateway makes by itself: of which sessions, when, at what cost. The target is a fake one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import count
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from galley.common.metrics import catalogue
from galley.common.redis.calls import RedisCalls, Script
from galley.core.audit import AUDIT_PRIORITY
from galley.core.errors import StoreUnavailable
from galley.core.store import StoredSession
from services.gateway.audit import auditor
from services.gateway.audit import records as stored
from services.gateway.audit.auditor import is_drawn
from services.gateway.audit.records import AuditRecords
from services.gateway.store.redis import RedisStore
from tests.fakes.changed_logs import change
from tests.fakes.http_client import http_client
from tests.fakes.redis_clusters import until
from tests.fakes.redis_servers import Server
from tests.fakes.replicas import PASS_NS
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, Gateway, World, receive
from tests.integration.services.gateway.test_metrics import Counted, counted


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let audits look for idle targets often, and take nearly all of their time."""
    monkeypatch.setattr(auditor, "_LOOK_S", 0.01)
    monkeypatch.setattr(auditor, "_LONGEST_REST_S", 0.01)
    monkeypatch.setattr(stored, "MOST_SHARE", 0.9)


@pytest.fixture
async def records(world: World) -> AsyncIterator[AuditRecords]:
    records = AuditRecords(world.redis_url, world.id)
    yield records
    await records.close()


async def auditing(world: World, ratio: float = 1.0, **given: Any) -> Counted:
    """Return a gateway, of the world's own pool, that audits by itself."""
    return await counted(world, pool=world.id, audit_ratio=ratio, draft="none", **given)


def audits(world: World) -> list[Any]:
    return [call for call in world.target.calls if call.slice.session_id.startswith("audit-")]


def turns_ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the computing time of each turn that ends."""
    ended: list[int] = []
    end_turn = AuditRecords.end_turn

    async def noting(self: AuditRecords, address: str, compute_ns: int) -> None:
        ended.append(compute_ns)
        await end_turn(self, address, compute_ns)

    monkeypatch.setattr(AuditRecords, "end_turn", noting)
    return ended


async def finish(gateway: Gateway, **options: Any) -> str:
    stream = gateway.generate(**options)
    await receive(stream)
    return stream.session_id


async def audited(records: AuditRecords, sessions: int) -> None:
    """Wait until so many sessions were audited."""
    async with asyncio.timeout(PATIENCE_S):
        while (await records.counts()).sessions < sessions:
            pass


async def done(it: Counted) -> None:
    """Wait until no session waits for its audit."""
    async with asyncio.timeout(PATIENCE_S):
        while it.number(catalogue.AUDIT_WAITING):
            await it.gateway.client.model_info()


async def delayed(logs: Sequence[Mapping[str, Any]]) -> None:
    """Wait until the log says that the store delays an audit."""

    async def is_delayed() -> bool:
        return any(line["event"] == "audit delayed" for line in logs)

    await until(is_delayed)


async def test_finished_sessions_are_audited_at_the_lowest_priority(
    world: World, records: AuditRecords
) -> None:
    it = await auditing(world)
    session_id = await finish(it.gateway, priority=3)
    await audited(records, 1)
    counts = await records.counts()
    assert (counts.tokens, counts.differing, counts.damaged) == (MAX_TOKENS, 0, 0)
    [salt] = {call.slice.tenant_salt for call in audits(world)}
    [served] = {call.slice.tenant_salt for call in world.target.calls if call.slice.session_id == session_id}
    assert salt != served
    assert {call.slice.priority for call in audits(world)} == {AUDIT_PRIORITY}
    assert {len(call.draft_tokens) for call in audits(world)} != {16}
    assert it.number(catalogue.AUDIT_TOKENS, "deterministic", "same") == MAX_TOKENS
    assert it.number(catalogue.AUDIT_TIME) == pytest.approx(len(audits(world)) * PASS_NS / 1e9)


async def test_a_session_that_opts_out_is_not_audited(world: World, records: AuditRecords) -> None:
    it = await auditing(world)
    await finish(it.gateway, no_audit=True)
    await finish(it.gateway)
    await audited(records, 1)
    await done(it)
    assert len({call.slice.session_id for call in audits(world)}) == 1


async def test_a_request_over_http_opts_out_too(world: World, records: AuditRecords) -> None:
    it = await auditing(world, http_port=0)
    async with http_client(it.gateway.http) as client:
        await client.complete(no_audit=True)
        await client.complete()
    await audited(records, 1)
    await done(it)
    assert len({call.slice.session_id for call in audits(world)}) == 1


async def test_the_share_of_sessions_is_the_ratio() -> None:
    ids = [f"{number:032x}" for number in range(20_000)]
    drawn = [session_id for session_id in ids if is_drawn(session_id, 0.01)]
    assert 150 < len(drawn) < 250
    assert not any(is_drawn(session_id, 0.0) for session_id in ids)
    assert all(is_drawn(session_id, 1.0) for session_id in ids)


async def test_a_busy_target_computes_no_audit(world: World, records: AuditRecords) -> None:
    """Its requests may be those of another gateway."""
    it = await auditing(world)
    world.target.queue_depth = 1
    await finish(it.gateway)
    looks = world.target.described
    await world.target.watch.until(lambda: world.target.described >= looks + 3)
    assert not audits(world)
    assert it.number(catalogue.AUDIT_WAITING) == 1
    world.target.queue_depth = 0
    await audited(records, 1)


async def test_a_session_does_not_wait_for_an_audit(world: World, records: AuditRecords) -> None:
    it = await auditing(world)
    world.target.gate.close_after(MAX_TOKENS)
    await finish(it.gateway)
    await world.target.watch.until(lambda: len(audits(world)) == 1)
    stream = it.gateway.generate()
    await world.target.was_cancelled()
    world.target.gate.permit(MAX_TOKENS)
    await receive(stream)
    world.target.gate.open()
    await audited(records, 2)


async def test_a_target_rests_after_an_audit(
    world: World, records: AuditRecords, shared_store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes for audits a hundredth of the time, whichever gateway audits."""
    monkeypatch.setattr(stored, "MOST_SHARE", 0.01)
    it = await auditing(world)
    await finish(it.gateway)
    await audited(records, 1)
    computed_ms = len(audits(world)) * PASS_NS / 1e6
    async with shared_store.raw() as raw:
        [key] = [key async for key in raw.scan_iter(f"galley:audit:{{{world.id}}}:turn:*")]
        rest_ms = await raw.pttl(key)
    assert 99 * computed_ms / 2 < rest_ms <= 99 * computed_ms + 1
    assert 0 < await records.begin_turn(world.target.address) <= rest_ms
    before, looks, wait_ms = len(audits(world)), [], AuditRecords.wait_ms

    async def counting(self: AuditRecords, address: str) -> int:
        looks.append(address)
        world.target.watch.changed()
        return await wait_ms(self, address)

    monkeypatch.setattr(AuditRecords, "wait_ms", counting)
    await finish(it.gateway)
    await world.target.watch.until(lambda: len(looks) > 3)
    assert len(audits(world)) == before


async def test_a_gateway_whose_turn_has_ended_ends_no_other_turn(
    world: World, records: AuditRecords, shared_store: Server
) -> None:
    other, third = (AuditRecords(world.redis_url, world.id) for _ in range(2))
    assert not await records.begin_turn("target:1")
    async with shared_store.raw() as raw:
        await raw.delete(*[key async for key in raw.scan_iter(f"galley:audit:{{{world.id}}}:turn:*")])
    assert not await other.begin_turn("target:1")
    before_ms = await third.begin_turn("target:1")
    await records.end_turn("target:1", 1)
    assert before_ms / 2 < await third.begin_turn("target:1") <= before_ms
    await other.end_turn("target:1", 10**12)
    rest_ms = stored.rest_ms(10**12)
    assert rest_ms / 2 < await third.begin_turn("target:1") <= rest_ms
    for each in (other, third):
        await each.close()


async def test_a_turn_that_ended_in_the_store_lets_the_target_rest(
    world: World, records: AuditRecords
) -> None:
    await records.end_turn("target:1", 10**12)
    assert await records.begin_turn("target:1")


async def test_a_gateway_that_missed_the_reply_begins_its_turn_again(
    world: World, records: AuditRecords
) -> None:
    other = AuditRecords(world.redis_url, world.id)
    assert not await records.begin_turn("target:1")
    assert await other.begin_turn("target:1")
    assert not await records.begin_turn("target:1")
    await records.end_turn("target:1", 10**12)
    assert await records.begin_turn("target:1"), "the next turn is another one"
    await other.close()


async def test_a_drain_ends_an_audit_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = turns_ended(monkeypatch)
    it = await auditing(world)
    world.target.gate.close_after(MAX_TOKENS)
    await finish(it.gateway)
    await world.target.watch.until(lambda: len(audits(world)) == 1)
    await cast("Any", it.gateway.running.service).drain()
    await world.target.was_cancelled()
    await done(it)
    assert it.number(catalogue.AUDIT_SKIPPED, "drained") == 1
    [compute_ns] = ended
    assert compute_ns > 0, "the target may have computed until it was cancelled, and rests for that"


async def test_a_session_that_is_gone_is_dropped(
    world: World, records: AuditRecords, shared_store: Server
) -> None:
    it = await auditing(world)
    world.target.queue_depth = 1
    _, gone, _ = [await finish(it.gateway) for _ in range(3)]
    async with shared_store.raw() as raw:
        await change(raw, gone, "the session is gone")
    world.target.queue_depth = 0
    await audited(records, 2)
    await done(it)
    assert len({call.slice.session_id for call in audits(world)}) == 2
    assert it.number(catalogue.AUDIT_SKIPPED, "expired") == 1


async def test_an_audit_ends_once_its_session_is_gone(
    world: World, records: AuditRecords, shared_store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted while its target rests."""
    monkeypatch.setattr(auditor, "_TURN_NS", 1)
    stored_ids: list[str] = []
    end_turn = AuditRecords.end_turn

    async def deleting(self: AuditRecords, address: str, compute_ns: int) -> None:
        async with shared_store.raw() as raw:
            while stored_ids:
                await change(raw, stored_ids.pop(), "the session is gone")
        await end_turn(self, address, compute_ns)

    monkeypatch.setattr(AuditRecords, "end_turn", deleting)
    it = await auditing(world)
    world.target.queue_depth = 1
    stored_ids.append(await finish(it.gateway))
    world.target.queue_depth = 0
    await done(it)
    assert len(audits(world)) == 1
    assert it.number(catalogue.AUDIT_SKIPPED, "expired") == 1
    assert 0 < (await records.counts()).tokens < MAX_TOKENS


async def test_an_audit_goes_on_after_its_session_could_not_be_read(
    world: World, records: AuditRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditor, "_TURN_NS", 1)
    read, numbers = RedisStore.read, count()

    async def failing(self: RedisStore, session_id: str, principal: str) -> StoredSession:
        if next(numbers) in {1, 2}:
            raise StoreUnavailable("redis")
        return await read(self, session_id, principal)

    it = await auditing(world)
    world.target.queue_depth = 1
    await finish(it.gateway)
    monkeypatch.setattr(RedisStore, "read", failing)
    with capture_logs() as logged:
        world.target.queue_depth = 0
        await audited(records, 1)
        await done(it)
    assert (await records.counts()).tokens == MAX_TOKENS
    assert [line["event"] for line in logged if line["log_level"] == "warning"] == ["audit delayed"]


async def test_an_audit_that_its_target_fails_is_counted_and_says_why(
    world: World, records: AuditRecords
) -> None:
    it = await auditing(world)
    world.target.queue_depth = 1
    session_id = await finish(it.gateway)
    world.target.item_failure = grpc.StatusCode.INTERNAL
    with capture_logs() as logged:
        world.target.queue_depth = 0
        await done(it)
    assert it.number(catalogue.AUDIT_SKIPPED, "failed") == 1
    [line] = [line for line in logged if line["event"] == "audit failed"]
    assert (line["session_id"], line["error"]) == (session_id, "the logits are not numbers")


async def test_an_audit_whose_turn_fails_is_made_later(
    world: World, records: AuditRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_turn, errors = AuditRecords.begin_turn, [StoreUnavailable("redis") for _ in range(2)]

    async def failing(self: AuditRecords, address: str) -> int:
        if errors:
            raise errors.pop()
        return await begin_turn(self, address)

    monkeypatch.setattr(AuditRecords, "begin_turn", failing)
    with capture_logs() as logged:
        it = await auditing(world)
        await finish(it.gateway)
        await audited(records, 1)
        await done(it)
    assert (await records.counts()).tokens == MAX_TOKENS
    assert not errors
    assert [line["event"] for line in logged if line["log_level"] == "warning"] == ["audit delayed"]


def fail(
    monkeypatch: pytest.MonkeyPatch, script: Script, fails: Callable[[int], bool], *, is_applied: bool = False
) -> None:
    """Let some calls of a script fail, by their number from 0; with `is_applied`, only their replies."""
    run, numbers = RedisCalls.run, count()

    async def failing(self: RedisCalls, called: Script, *given: Any) -> object:
        if called is script and fails(next(numbers)):
            if is_applied:
                await run(self, called, *given)
            raise StoreUnavailable("redis")
        return await run(self, called, *given)

    monkeypatch.setattr(RedisCalls, "run", failing)


@pytest.mark.parametrize("script", [stored._BEGIN, stored._END], ids=["begin", "end"])
async def test_an_audit_goes_on_after_an_error_between_its_turns(
    world: World, records: AuditRecords, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    monkeypatch.setattr(auditor, "_TURN_NS", 1)
    fail(monkeypatch, script, lambda number: number == 1)
    with capture_logs() as logged:
        it = await auditing(world)
        await finish(it.gateway)
        await audited(records, 1)
        await done(it)
    assert len({call.slice.session_id for call in audits(world)}) == 1
    assert (await records.counts()).tokens == MAX_TOKENS
    assert [line["event"] for line in logged if line["log_level"] == "warning"] == ["audit delayed"]


async def test_a_target_rests_after_a_turn_whose_end_failed(
    world: World, records: AuditRecords, shared_store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt takes more than a turn that ends by itself lets the target rest for."""
    monkeypatch.setattr(stored, "MOST_SHARE", 1e-4)
    fail(monkeypatch, stored._END, lambda number: number == 0)
    it = await auditing(world)
    await finish(it.gateway)
    await audited(records, 1)
    async with shared_store.raw() as raw:
        [key] = [key async for key in raw.scan_iter(f"galley:audit:{{{world.id}}}:turn:*")]
        assert await raw.pttl(key) > 1000 * stored._TURN_S


async def test_a_drain_ends_an_audit_while_the_store_is_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = await auditing(world)
    world.target.gate.close_after(MAX_TOKENS)
    await finish(it.gateway)
    await world.target.watch.until(lambda: len(audits(world)) == 1)
    fail(monkeypatch, stored._END, lambda _: True)
    await cast("Any", it.gateway.running.service).drain()
    await world.target.was_cancelled()
    await done(it)


async def test_a_damaged_session_is_counted_and_the_next_one_audited(
    world: World, records: AuditRecords, shared_store: Server
) -> None:
    it = await auditing(world)
    world.target.queue_depth = 1
    _, damaged, _ = [await finish(it.gateway) for _ in range(3)]
    async with shared_store.raw() as raw:
        await change(raw, damaged, "an output token is flipped")
    world.target.queue_depth = 0
    await audited(records, 3)
    counts = await records.counts()
    assert (counts.damaged, counts.tokens) == (1, 2 * MAX_TOKENS)
    [incident] = await records.incidents()
    assert (incident["session_id"], incident["verdict"]) == (damaged, "damaged")
    world.expect_error("audit found an incident")


@pytest.mark.parametrize("is_applied", [False, True], ids=["the call is lost", "the reply is lost"])
async def test_an_incident_is_recorded_once_when_the_store_is_back(
    world: World,
    records: AuditRecords,
    shared_store: Server,
    monkeypatch: pytest.MonkeyPatch,
    is_applied: bool,
) -> None:
    fail(monkeypatch, stored._ADD, lambda number: number < 2, is_applied=is_applied)
    it = await auditing(world)
    world.target.queue_depth = 1
    damaged = await finish(it.gateway)
    async with shared_store.raw() as raw:
        await change(raw, damaged, "an output token is flipped")
    world.target.queue_depth = 0
    await done(it)
    [incident] = await records.incidents()
    assert incident["session_id"] == damaged
    assert (await records.counts()).damaged == 1
    assert it.number(catalogue.AUDIT_SESSIONS, "damaged") == 1
    world.expect_error("audit found an incident")


async def test_an_incident_that_a_drain_leaves_unrecorded_is_in_the_log(
    world: World, records: AuditRecords, shared_store: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, stored._ADD, lambda _: True)
    it = await auditing(world)
    world.target.queue_depth = 1
    damaged = await finish(it.gateway)
    async with shared_store.raw() as raw:
        await change(raw, damaged, "an output token is flipped")
    with capture_logs() as logs:
        world.target.queue_depth = 0
        await delayed(logs)
        await cast("Any", it.gateway.running.service).drain()
        await done(it)
    assert [line["session_id"] for line in logs if line["event"] == "audit not stored"] == [damaged]
    assert it.number(catalogue.AUDIT_SESSIONS, "damaged") == 1
    assert it.number(catalogue.AUDIT_SKIPPED, "drained") == 0

"""Sessions that wait for their audit: which of several targets audits them, and which are skipped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from galley.common.metrics import catalogue
from galley.core.errors import StoreUnavailable
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.audit import auditor
from services.gateway.audit.records import AuditRecords
from services.gateway.clock import SECOND
from tests.fakes.fleet import Fleet
from tests.fakes.redis_clusters import until
from tests.fakes.replicas import FakeTarget
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import MAX_TOKENS, PROMPT_TOKENS, World
from tests.integration.services.gateway.audit.test_by_itself import (
    auditing,
    audits,
    delayed,
    done,
    finish,
    quick,
    records,
    turns_ended,
)
from tests.integration.services.gateway.test_metrics import Counted

__all__ = ["quick", "records"]

_LONG_NS = 10**12


@pytest.fixture
async def others(world: World) -> AsyncIterator[list[FakeTarget]]:
    """Two targets more of the build."""
    async with Fleet(world) as fleet:
        yield [member.fake for member in fleet.members]


def audits_at(target: FakeTarget) -> int:
    return sum(call.slice.session_id.startswith("audit-") for call in target.calls)


async def test_a_target_that_rests_keeps_no_other_from_auditing(
    world: World, records: AuditRecords, others: list[FakeTarget]
) -> None:
    """The choice by itself would be the one that rests."""
    targets = [world.target, *others]
    it = await auditing(world, target=",".join(target.address for target in targets))
    await finish(it.gateway, no_audit=True)
    [served] = [target for target in targets if target.calls]
    free, rests = sorted((it for it in targets if it is not served), key=lambda it: it.address)
    assert not await records.begin_turn(rests.address)
    await records.end_turn(rests.address, _LONG_NS)
    for _ in "12":
        await finish(it.gateway)
    await done(it)
    assert (await records.counts()).sessions == 2
    assert [audits_at(target) > 0 for target in (free, rests, served)] == [True, False, False]


async def test_busy_targets_keep_no_idle_one_from_auditing(world: World, records: AuditRecords) -> None:
    """With so many targets the choice compares two that it draws for a session, which may be busy ones."""
    async with Fleet(world, "abcdefgh") as fleet:
        for target in fleet.members:
            target.pool_name = world.id
            target.fake.queue_depth = 1
        await fleet.register()
        it = await auditing(world, target="")
        for _ in range(8):
            await finish(it.gateway)
        assert it.number(catalogue.AUDIT_WAITING) == 8
        for target in fleet.members[:2]:
            target.fake.queue_depth = 0
            await target.publish()
        await done(it)
        assert it.number(catalogue.AUDIT_SESSIONS, "same") == 8
        assert not any(audits_at(target.fake) for target in fleet.members[2:])


async def test_a_session_waits_for_a_target_that_comes_again(world: World, records: AuditRecords) -> None:
    async with Fleet(world, "a") as fleet:
        [target] = fleet.members
        target.pool_name = world.id
        target.fake.queue_depth = 1
        await fleet.register()
        it = await auditing(world, target="")
        for _ in "12":
            await finish(it.gateway)
        await target.withdraw()
        await until(lambda: _is_away(it))
        target.fake.queue_depth = 0
        await target.register()
        await done(it)
        assert it.number(catalogue.AUDIT_SESSIONS, "same") == 2


async def test_a_session_that_no_target_can_audit_holds_up_no_other(
    world: World, records: AuditRecords
) -> None:
    """It is longer than the context window that the targets have now."""
    async with Fleet(world, "a") as fleet:
        [target] = fleet.members
        target.pool_name = world.id
        target.fake.queue_depth = 1
        await fleet.register()
        it = await auditing(world, target="")
        await finish(it.gateway)
        await finish(it.gateway, max_tokens=4)
        target.fake.queue_depth = 0
        await target.publish(context=len(PROMPT_TOKENS) + MAX_TOKENS - 1)

        async def is_audited() -> bool:
            """Return True once one is, and has left the backlog, which comes a moment later."""
            counts = it.number(catalogue.AUDIT_SESSIONS, "same"), it.number(catalogue.AUDIT_WAITING)
            return counts == (1, 1)

        await until(is_audited)


async def test_a_drain_counts_a_session_whose_audit_the_store_delays(
    world: World, records: AuditRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_self: AuditRecords, _address: str) -> int:
        raise StoreUnavailable("the session store is unavailable")

    monkeypatch.setattr(AuditRecords, "wait_ms", away)
    it = await auditing(world)
    with capture_logs() as logs:
        await finish(it.gateway)
        await delayed(logs)
        await cast("Any", it.gateway.running.service).drain()
        await done(it)
    assert it.number(catalogue.AUDIT_SKIPPED, "drained") == 1


async def _is_away(it: Counted) -> bool:
    return it.number(catalogue.REPLICAS, "target", "up") == 0


async def test_a_session_that_expires_before_a_target_has_time_is_counted(
    world: World, records: AuditRecords
) -> None:
    await records.end_turn(world.target.address, _LONG_NS)
    it = await auditing(world, finished_ttl_s=0.1)
    await finish(it.gateway)
    await done(it)
    assert it.number(catalogue.AUDIT_SKIPPED, "expired") == 1
    assert not audits(world)


async def test_sessions_beyond_the_backlog_are_counted(
    world: World, records: AuditRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auditor, "MAX_WAITING", 2)
    world.target.queue_depth = 1
    it = await auditing(world)
    sessions = 6
    for _ in range(sessions):
        await finish(it.gateway)
    world.target.queue_depth = 0
    await done(it)
    skipped = it.number(catalogue.AUDIT_SKIPPED, "backlog")
    assert skipped
    assert skipped + it.number(catalogue.AUDIT_SESSIONS, "same") == sessions


async def test_a_long_session_is_audited_in_part(world: World, records: AuditRecords) -> None:
    """Its target would otherwise rest for hours."""

    def take_long(result: pb.VerifyResult) -> None:
        result.timing.compute_ns = auditor._MOST_NS

    it = await auditing(world)
    world.target.queue_depth = 1
    await finish(it.gateway)
    world.target.spoil = take_long
    world.target.queue_depth = 0
    await done(it)
    assert len(audits(world)) == 1
    assert it.number(catalogue.AUDIT_SESSIONS, "same") == 1
    assert 0 < (await records.counts()).tokens < MAX_TOKENS
    assert it.number(catalogue.AUDIT_SKIPPED, "long") == 1


async def test_a_request_without_a_response_ends_the_audit_at_its_limit(
    world: World, records: AuditRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its target rests for 99 times as long, and not for 99 times the timeout of requests."""
    most_ns = SECOND // 10
    monkeypatch.setattr(auditor, "_MOST_NS", most_ns)
    ended = turns_ended(monkeypatch)
    it = await auditing(world)
    world.target.gate.close_after(MAX_TOKENS)
    await finish(it.gateway)
    await done(it)
    await world.target.was_cancelled()
    assert it.number(catalogue.AUDIT_SKIPPED, "long") == 1
    [compute_ns] = ended
    assert most_ns <= compute_ns < PATIENCE_S * SECOND

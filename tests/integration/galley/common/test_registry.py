"""The registry of replicas, on a real Valkey."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot
from structlog.testing import capture_logs

from galley.common.redis.calls import RedisCalls
from galley.common.registry.leases import (
    DRAFT_POOL,
    MAX_CACHED_PREFIXES,
    TARGET_POOL,
    Replaced,
    ReplicaRegistry,
    check_pool_name,
    draft_lease,
    target_lease,
)
from galley.common.registry.registration import start_registration
from galley.core.errors import StoreUnavailable
from galley.core.routing.choice import TargetLease
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.redis_clusters import Cluster
from tests.fakes.redis_servers import BINARIES, Server, running

POOL = TARGET_POOL
WAIT_S = 10.0


@pytest.fixture(params=BINARIES)
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with running(request.param) as server:
        yield server


@pytest.fixture
async def registry(server: Server | Cluster) -> AsyncIterator[ReplicaRegistry]:
    registry = ReplicaRegistry(server.url, call_timeout_s=5)
    yield registry
    await registry.close()


def info(incarnation: str = "life-1") -> pb.GetTargetInfoResponse:
    return pb.GetTargetInfoResponse(
        model="tiny",
        tokenizer_hash="hash",
        context_window=1024,
        vocab_size=256,
        eos_token_ids=[2, 7],
        fingerprint="build-1",
        deterministic=True,
        incarnation=incarnation,
        max_draft_tokens=16,
        dtype="float32",
        device="cpu",
        ranks=3,
        kv_block_tokens=32,
        kv_blocks_total=100,
        kv_blocks_free=40,
        queue_depth=5,
        grammar_kinds=["regex", "choice"],
    )


def lease(address: str = "host:1", incarnation: str = "life-1", prefixes: int = 2) -> TargetLease:
    return target_lease(address, info(incarnation), [bytes([n]) * 16 for n in range(prefixes)])


async def until(registry: ReplicaRegistry, expected: object) -> None:
    async with asyncio.timeout(WAIT_S):
        while await read(registry) != expected:  # noqa: ASYNC110  # Redis does not call back
            await asyncio.sleep(0.01)


async def read(registry: ReplicaRegistry) -> list[tuple[str, str, bool]] | None:
    try:
        return [(it.address, it.incarnation, it.draining) for it in await registry.read(POOL)]
    except StoreUnavailable:
        return None


async def test_published_leases_are_read(registry: ReplicaRegistry) -> None:
    first, second = lease("host:1"), replace(lease("[::1]:2", prefixes=0), draining=True, deterministic=False)
    await registry.publish(POOL, first)
    await registry.publish(POOL, second)
    assert await registry.read(POOL) == [second, first]
    assert await registry.read(DRAFT_POOL) == []


async def test_drafts_have_a_pool_of_their_own(registry: ReplicaRegistry) -> None:
    info = pb.GetDraftInfoResponse(
        model="tiny-draft",
        tokenizer_hash="hash",
        strategies=["model", "ngram"],
        default_strategy="ngram",
        incarnation="life-1",
        max_draft_tokens=16,
        vocab_size=256,
    )
    draft = replace(draft_lease("host:1", info, sessions=5, queue_depth=2), draining=True)
    await registry.publish(DRAFT_POOL, draft)
    await registry.publish(POOL, lease())
    assert await registry.read(DRAFT_POOL) == [draft]
    assert await registry.read(POOL) == [lease()]
    bare = draft_lease("host:1", pb.GetDraftInfoResponse(incarnation="life-2"))
    await registry.publish(DRAFT_POOL, bare)
    assert await registry.read(DRAFT_POOL) == [bare]
    await registry.withdraw(DRAFT_POOL, "host:1", "life-2")
    assert await registry.read(DRAFT_POOL) == []
    assert await registry.read(POOL) == [lease()]


async def test_a_renewed_lease_has_the_new_values(registry: ReplicaRegistry) -> None:
    await registry.publish(POOL, lease())
    busy = replace(lease(), queue_depth=9, kv_blocks_free=1)
    await registry.publish(POOL, busy)
    assert await registry.read(POOL) == [busy]
    warm = replace(busy, cached_prefixes=frozenset([b"x" * 16]))
    await registry.publish(POOL, warm)
    assert await registry.read(POOL) == [warm]


async def test_prefixes_outlast_a_lease_that_ended(
    server: Server | Cluster, registry: ReplicaRegistry
) -> None:
    await registry.publish(POOL, lease())
    await server.command("FLUSHALL")
    await registry.publish(POOL, lease())
    assert await registry.read(POOL) == [lease()]


async def test_prefixes_outlast_a_call_that_failed(
    server: Server | Cluster, registry: ReplicaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    await registry.publish(POOL, lease())
    await server.command("FLUSHALL")
    run, calls = RedisCalls.run, iter([True, False])

    async def once(*args: Any) -> object:
        if not next(calls, True):
            raise StoreUnavailable("away")
        return await run(*args)

    monkeypatch.setattr(RedisCalls, "run", once)
    with pytest.raises(StoreUnavailable):
        await registry.publish(POOL, lease())
    await registry.publish(POOL, lease())
    assert await registry.read(POOL) == [lease()]


async def test_an_expired_lease_is_removed(server: Server | Cluster, registry: ReplicaRegistry) -> None:
    short = ReplicaRegistry(server.url, lease_s=0.05)
    await short.publish(POOL, lease("gone:1"))
    await registry.publish(POOL, lease("here:1"))
    await until(registry, [("here:1", "life-1", False)])
    assert await server.command("SMEMBERS", "galley:replicas:{default}:target") == {b"here:1"}
    await short.close()


async def test_a_new_process_replaces_the_old_one_which_cannot_withdraw_it(registry: ReplicaRegistry) -> None:
    await registry.publish(POOL, lease(incarnation="life-1"))
    await registry.publish(POOL, lease(incarnation="life-2", prefixes=0))
    await registry.withdraw(POOL, "host:1", "life-1")
    assert await registry.read(POOL) == [lease(incarnation="life-2", prefixes=0)]
    await registry.withdraw(POOL, "host:1", "life-2")
    assert await registry.read(POOL) == []


async def test_keys_of_a_pool_share_a_slot_and_expire(
    server: Server | Cluster, registry: ReplicaRegistry
) -> None:
    await registry.publish(POOL, lease())
    async with server.raw() as raw:
        keys = sorted([key async for key in raw.scan_iter()])
    base = b"galley:replicas:{default}:target"
    assert keys == [base, base + b":host:1", base + b":host:1:born"]
    assert len({key_slot(key) for key in keys}) == 1
    assert 0 < await server.command("PTTL", "galley:replicas:{default}:target:host:1") <= 3000


async def test_pools_of_one_server_are_apart(server: Server | Cluster, registry: ReplicaRegistry) -> None:
    other = ReplicaRegistry(server.url, "other", call_timeout_s=5)
    await registry.publish(POOL, lease("here:1"))
    await other.publish(POOL, lease("there:1"))
    await other.publish(POOL, lease("here:1", "life-9"))
    assert [it.incarnation for it in await registry.read(POOL)] == ["life-1"]
    await other.withdraw(POOL, "here:1", "life-9")
    assert [it.address for it in await other.read(POOL)] == ["there:1"]
    assert [it.address for it in await registry.read(POOL)] == ["here:1"]
    await other.close()


@pytest.mark.parametrize("missing", ["weights_digest", "cached_prefixes"])
async def test_leases_of_an_older_release_are_read(
    server: Server | Cluster, registry: ReplicaRegistry, missing: str
) -> None:
    await registry.publish(POOL, lease())
    key = "galley:replicas:{default}:target:host:1"
    await server.command("HDEL", key, missing)
    await server.command("HSET", key, "of_a_newer_release", "1")
    [found] = await registry.read(POOL)
    assert not getattr(found, missing)


@pytest.mark.parametrize("name", ["", "a:b", "{a}", "a*", "x" * 129, "a\n"])
def test_names_that_are_no_part_of_a_key_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be 1 to 128 letters"):
        check_pool_name(name)


async def test_unreadable_leases_are_skipped(server: Server | Cluster, registry: ReplicaRegistry) -> None:
    await registry.publish(POOL, lease("good:1"))
    await registry.publish(POOL, lease("odd:1"))
    await server.command("HSET", "galley:replicas:{default}:target:odd:1", "ranks", "three")
    assert [it.address for it in await registry.read(POOL)] == ["good:1"]


async def test_members_that_are_no_replicas_are_removed(
    server: Server | Cluster, registry: ReplicaRegistry
) -> None:
    await registry.publish(POOL, lease("good:1"))
    index = "galley:replicas:{default}:target"
    await server.command("SADD", index, b"\xff", "good:1:born", "gone:1")
    for _ in range(2):
        assert [it.address for it in await registry.read(POOL)] == ["good:1"]
        assert await server.command("SMEMBERS", index) == {b"good:1"}


async def test_a_field_whose_name_is_no_text_is_ignored(
    server: Server | Cluster, registry: ReplicaRegistry
) -> None:
    await registry.publish(POOL, lease("good:1"))
    await server.command("HSET", "galley:replicas:{default}:target:good:1", b"\xff", "1")
    assert [it.address for it in await registry.read(POOL)] == ["good:1"]


async def test_prefixes_are_bounded() -> None:
    many = [n.to_bytes(16, "little") for n in range(2 * MAX_CACHED_PREFIXES)]
    assert target_lease("a:1", info(), many).cached_prefixes == frozenset(many[:MAX_CACHED_PREFIXES])


async def test_an_unreachable_server_is_unavailable() -> None:
    with tempfile.TemporaryDirectory(prefix="galley-") as directory:
        registry = ReplicaRegistry(f"unix://{Path(directory) / 's'}", call_timeout_s=0.2)
        with pytest.raises(StoreUnavailable):
            await registry.read(POOL)
        with pytest.raises(StoreUnavailable):
            await registry.publish(POOL, lease())
        await registry.close()


async def test_a_replica_is_registered_drains_and_withdraws(
    server: Server | Cluster, registry: ReplicaRegistry
) -> None:
    registration = start_registration(server.url, POOL, lease)
    await until(registry, [("host:1", "life-1", False)])
    await registration.drain()
    assert await read(registry) == [("host:1", "life-1", True)]
    await registration.close()
    assert await read(registry) == []


async def test_a_replica_renews_its_lease_with_its_load(
    server: Server | Cluster, registry: ReplicaRegistry
) -> None:
    depth = iter(range(1000))
    registration = start_registration(
        server.url,
        POOL,
        lambda: replace(lease(), queue_depth=next(depth)),
        lease_s=0.3,
    )
    await until(registry, [("host:1", "life-1", False)])
    depth_read = 0
    async with asyncio.timeout(WAIT_S):
        while depth_read < 4:
            depth_read = max((it.queue_depth for it in await registry.read(POOL)), default=depth_read)
    await registration.close()


async def test_a_replica_registers_again_after_an_unexpected_error(own_server: Server) -> None:
    noted: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: noted.append(context["message"]))
    registry = ReplicaRegistry(own_server.url, call_timeout_s=5)
    failures = [ValueError("no such device")] * 2

    def lease_after_failures() -> TargetLease:
        if failures:
            raise failures.pop()
        return lease()

    registration = start_registration(own_server.url, POOL, lease_after_failures, lease_s=0.3)
    await until(registry, [("host:1", "life-1", False)])
    assert noted == ["registration failed"], "once"
    await registration.close()
    await registry.close()


async def test_a_replica_withdraws_its_lease_if_its_state_cannot_be_read(
    server: Server | Cluster, registry: ReplicaRegistry
) -> None:
    failures: list[Exception] = []

    def lease_unless_failing() -> TargetLease:
        if failures:
            raise failures[0]
        return lease()

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    registration = start_registration(server.url, POOL, lease_unless_failing)
    await until(registry, [("host:1", "life-1", False)])
    failures.append(ValueError("no such device"))
    await registration.drain()
    await registration.close()
    assert await read(registry) == []


async def test_a_replica_registers_again_after_the_store_was_killed(own_server: Server) -> None:
    registry = ReplicaRegistry(own_server.url, call_timeout_s=5)
    registration = start_registration(own_server.url, POOL, lease, lease_s=0.3)
    await until(registry, [("host:1", "life-1", False)])
    own_server.kill()
    await until(registry, None)
    own_server.start()
    await until(registry, [("host:1", "life-1", False)])
    await registration.close()
    await registry.close()


async def test_a_replica_closes_while_the_store_is_away(own_server: Server) -> None:
    registry = ReplicaRegistry(own_server.url, call_timeout_s=5)
    registration = start_registration(own_server.url, POOL, lease)
    await until(registry, [("host:1", "life-1", False)])
    own_server.kill()
    await registration.drain()
    await registration.close()
    await registry.close()


async def test_scripts_are_sent_again_after_script_flush(
    server: Server | Cluster, registry: ReplicaRegistry
) -> None:
    for depth in range(3):
        busy = replace(lease(), queue_depth=depth)
        await server.command("SCRIPT FLUSH")
        await registry.publish(POOL, busy)
        await server.command("SCRIPT FLUSH")
        assert await registry.read(POOL) == [busy]
    await server.command("SCRIPT FLUSH")
    await registry.withdraw(POOL, "host:1", "life-1")
    assert await registry.read(POOL) == []


async def successors_of(registry: ReplicaRegistry, how: str) -> list[TargetLease]:
    await registry.publish(POOL, lease(incarnation="life-1"))
    match how:
        case "lives":
            await registry.publish(POOL, lease(incarnation="life-2"))
        case "has a successor":
            await registry.publish(POOL, lease(incarnation="life-2"))
            await registry.publish(POOL, lease(incarnation="life-3"))
        case "withdrew":
            await registry.publish(POOL, lease(incarnation="life-2"))
            await registry.withdraw(POOL, "host:1", "life-2")
        case "came when the lease had ended":
            await registry.withdraw(POOL, "host:1", "life-1")
            await registry.publish(POOL, lease(incarnation="life-2"))
    return await registry.read(POOL)


@pytest.mark.parametrize("how", ["lives", "has a successor", "withdrew", "came when the lease had ended"])
async def test_a_replaced_process_cannot_register_again(registry: ReplicaRegistry, how: str) -> None:
    there = await successors_of(registry, how)
    for _ in range(2):
        with pytest.raises(Replaced):
            await registry.publish(POOL, lease(incarnation="life-1"))
        assert await registry.read(POOL) == there
    await registry.publish(POOL, lease(incarnation="life-4"))
    assert await read(registry) == [("host:1", "life-4", False)]


async def test_a_late_first_publication_does_not_replace_the_successor(
    server: Server | Cluster, registry: ReplicaRegistry
) -> None:
    dead = ReplicaRegistry(server.url)
    await dead.publish(POOL, lease(incarnation="life-1"))
    await server.command("DEL", "galley:replicas:{default}:target:host:1:born")
    await registry.publish(POOL, lease(incarnation="life-2"))
    with pytest.raises(Replaced):
        await dead.publish(POOL, lease(incarnation="life-1"))
    await dead.close()
    await registry.publish(POOL, lease(incarnation="life-2"))
    assert await read(registry) == [("host:1", "life-2", False)]
    assert await server.command("PTTL", "galley:replicas:{default}:target:host:1:born") > 23 * 3600 * 1000


async def test_a_replaced_registration_logs_an_error_and_stops_renewing(own_server: Server) -> None:
    registry = ReplicaRegistry(own_server.url, call_timeout_s=5)
    with capture_logs() as logs:
        registration = start_registration(own_server.url, POOL, lease, lease_s=0.3)
        await until(registry, [("host:1", "life-1", False)])
        own_server.kill()
        await logged(logs, "warning")
        own_server.start()
        await until(registry, [("host:1", "life-1", False)])
        await registry.publish(POOL, lease(incarnation="life-2"))
        await logged(logs, "error")
        await own_server.command("FLUSHALL")
        await registration.drain()
        assert await read(registry) == []
        await registration.close()
    [error] = [line for line in logs if line["log_level"] == "error"]
    assert "host:1" in error["error"]
    await registry.close()


async def logged(logs: list[Any], level: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while not any(line["log_level"] == level for line in logs):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

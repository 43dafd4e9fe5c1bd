"""Compare the simulated registry with the real scripts on a real server: same calls, same answers."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from operator import attrgetter

import pytest
from redis import asyncio as redis_asyncio

from galley.common.registry.leases import DEFAULT_POOL, TARGET_POOL, Replaced, ReplicaRegistry, target_lease
from galley.core.routing.choice import TargetLease
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.simulation.system.redis import Leases

_RUNS = 10
_CALLS = 60
_ADDRESSES = ("one:1", "two:2")
_LEASE_S = 1000.0


class _Leases(Leases):
    def __init__(self) -> None:
        super().__init__(_LEASE_S, lambda: 0.0)
        self._incarnations: dict[tuple[str, str], int] = {}

    def refuses(self, lease: TargetLease) -> bool:
        incarnation = (lease.address, lease.incarnation)
        if incarnation not in self._incarnations:
            self._incarnations[incarnation] = self.next_number()
        try:
            self.publish(TARGET_POOL.name, lease, self._incarnations[incarnation])
        except Replaced:
            return True
        return False

    def end(self, address: str) -> None:
        self._held.pop((TARGET_POOL.name, address), None)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(VALKEY, "--appendfsync", "no") as server:
        yield server


@pytest.fixture
async def client(server: Server) -> AsyncIterator[redis_asyncio.Redis]:
    client = redis_asyncio.Redis.from_url(server.url)
    yield client
    await client.aclose()


def _lease(rng: random.Random, address: str) -> TargetLease:
    incarnation, depth = rng.choice("aaabbbcd"), rng.randrange(4)
    return target_lease(address, pb.GetTargetInfoResponse(incarnation=incarnation, queue_depth=depth))


async def test_leases_match_the_scripts(server: Server, client: redis_asyncio.Redis) -> None:
    refused = 0
    for seed in range(_RUNS):
        await client.flushall()
        registry = ReplicaRegistry(server.url, lease_s=_LEASE_S)
        rng, model = random.Random(seed), _Leases()
        for number in range(_CALLS):
            refused += await _same(rng, model, registry, client)
            read = await registry.read(TARGET_POOL)
            assert sorted(read, key=attrgetter("address")) == model.read(TARGET_POOL.name), (seed, number)
        await registry.close()
    assert refused > _RUNS


async def _same(
    rng: random.Random, model: _Leases, registry: ReplicaRegistry, client: redis_asyncio.Redis
) -> bool:
    address = rng.choice(_ADDRESSES)
    lease = _lease(rng, address)
    match rng.choice(["publish", "publish", "publish", "withdraw", "end"]):
        case "publish":
            refused = model.refuses(lease)
            try:
                await registry.publish(TARGET_POOL, lease)
            except Replaced:
                assert refused, lease
            else:
                assert not refused, lease
            return refused
        case "withdraw":
            model.withdraw(TARGET_POOL.name, address, lease.incarnation)
            await registry.withdraw(TARGET_POOL, address, lease.incarnation)
        case _:
            model.end(address)
            await client.delete(f"galley:replicas:{{{DEFAULT_POOL}}}:{TARGET_POOL.name}:{address}")
    return False

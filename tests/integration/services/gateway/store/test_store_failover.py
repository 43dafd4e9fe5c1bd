"""The store where it is several servers: slots that move, masters that die, replicas that are behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from redis.crc import key_slot

from galley.common.redis.calls import Copies
from galley.core.errors import StoreUnavailable
from galley.core.store import LogBehind, Ownership
from services.gateway.clock import SECOND, MonotonicClock
from services.gateway.store.redis import RedisStore
from services.gateway.store.session_log import retry
from tests.fakes.owners import abort, claim, commit, create, finish
from tests.fakes.redis_clusters import (
    PATIENCE_S,
    Cluster,
    ClusterNode,
    ReplicaSet,
    cluster_servers,
    either,
    follows,
    replica_set,
    until,
)
from tests.fakes.redis_servers import BINARIES
from tests.integration.services.gateway.store.test_store import ALICE, PROMPT, a_session, key_of, store_at

T = TypeVar("T")

NODE_TIMEOUT_MS = 1000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with cluster_servers(either(), 1, NODE_TIMEOUT_MS) as servers:
        asyncio.run(servers.form())
        yield servers


@pytest.fixture
async def watched() -> AsyncIterator[ReplicaSet]:
    async with replica_set(either()) as servers:
        yield servers


@pytest.fixture(params=BINARIES)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[ReplicaSet]:
    async with replica_set(request.param) as servers:
        yield servers


def session_in(first: int, last: int) -> str:
    ids = (f"{number:032x}" for number in range(10**6))
    return next(each for each in ids if first <= key_slot(key_of(each).encode()) <= last)


async def in_time(call: Callable[[], Awaitable[T]]) -> T:
    clock = MonotonicClock()
    return await retry("test", call, clock.now_ns() + int(PATIENCE_S * SECOND), clock)


async def copied(pair: ReplicaSet, owner: Ownership, tokens: list[int]) -> None:
    async with store_at(pair, copies=Copies(1)) as careful:
        await in_time(lambda: commit(careful, owner, 3, tokens, b"." * len(tokens)))


async def must_hold(store: RedisStore, owner: Ownership, tokens: list[int]) -> None:
    seen = await claim(store, owner.session_id, ALICE, nonce=owner.nonce)
    assert seen.tokens == [*PROMPT, *tokens]
    assert seen.ownership == owner, "nobody else has claimed it"


class Moving:
    def __init__(self, cluster: Cluster, slot: int) -> None:
        self._slot = str(slot)
        self._nodes = cluster.masters
        self._ids: list[str] = []
        self._cluster = cluster

    @property
    def source(self) -> ClusterNode:
        return self._nodes[0]

    @property
    def goal(self) -> ClusterNode:
        return self._nodes[1]

    async def begin(self) -> None:
        self._ids = [await self._cluster.node_id(node) for node in self._nodes]
        await self._set(self.goal, "IMPORTING", self._ids[0])
        await self._set(self.source, "MIGRATING", self._ids[1])

    async def move(self, *keys: str) -> None:
        where = ("127.0.0.1", str(self.goal.port), "", "0", "5000", "KEYS")
        assert await self.source.command("MIGRATE", *where, *keys)

    async def end(self) -> None:
        for node in (self.goal, self.source):
            await self._set(node, "NODE", self._ids[1])

    async def _set(self, node: ClusterNode, *how: str) -> None:
        await node.command("CLUSTER", "SETSLOT", self._slot, *how)


async def test_a_session_is_followed_when_its_slot_moves(cluster: Cluster) -> None:
    session_id = session_in(0, 999)
    key = key_of(session_id)
    moving = Moving(cluster, key_slot(key.encode()))
    async with store_at(cluster) as store:
        owner = (await create(store, a_session(session_id))).ownership
        assert await commit(store, owner, 3, [1], b".") == 4
        await moving.begin()
        assert await commit(store, owner, 4, [2], b".") == 5, "all of it is where it was"
        await moving.move(f"{key}:log")
        with pytest.raises(StoreUnavailable):
            await commit(store, owner, 5, [3], b".")  # a part of it is here, a part there: TRYAGAIN
        await moving.move(key, f"{key}:meta")
        commits = [commit(store, owner, 5, [3], b".") for _ in range(20)]
        assert set(await asyncio.gather(*commits)) == {6}, "ASK, each time"
        with pytest.raises(StoreUnavailable):
            await abort(store, session_id, ALICE, b"aborted")  # it needs a key that is nowhere yet: TRYAGAIN
        await moving.end()
        assert await commit(store, owner, 6, [4], b".") == 7, "MOVED"
        await must_hold(store, owner, [1, 2, 3, 4])
        await abort(store, session_id, ALICE, b"aborted")


async def test_a_lost_node_is_unavailable_until_failover(cluster: Cluster) -> None:
    [replica] = cluster.replicas
    async with store_at(cluster, call_timeout_s=1.5, copies=Copies(1)) as careful:
        new = a_session(session_in(1000, 5000))
        owner = (await in_time(lambda: create(careful, new, b"n" * 16))).ownership
        assert await commit(careful, owner, 3, [1], b".") == 4
        elsewhere = a_session(session_in(7001, 10_000))
        with pytest.raises(StoreUnavailable):
            await create(careful, elsewhere)  # no replica stands behind that master
    async with store_at(cluster, call_timeout_s=1.5) as store:
        await must_hold(store, owner, [1])
        cluster.masters[0].kill()
        with pytest.raises(StoreUnavailable):
            await commit(store, owner, 4, [2], b".")
        assert await in_time(lambda: commit(store, owner, 4, [2], b".")) == 5
        cluster.masters[0].start()
        await until(lambda: follows(cluster.masters[0]))
        assert (await replica.command("INFO", "replication"))["role"] == "master"
        assert await in_time(lambda: commit(store, owner, 5, [3], b".")) == 6
        await must_hold(store, owner, [1, 2, 3])


async def test_a_node_that_hangs_is_unavailable(cluster: Cluster) -> None:
    async with store_at(cluster, call_timeout_s=1) as store:
        owner = (await create(store, a_session(session_in(6000, 7000)))).ownership
        cluster.masters[1].pause()
        try:
            with pytest.raises(StoreUnavailable):
                await commit(store, owner, 3, [1], b".")
        finally:
            cluster.masters[1].go_on()
        assert await in_time(lambda: commit(store, owner, 3, [1], b".")) == 4
        await must_hold(store, owner, [1])


async def test_a_cluster_without_nodes(cluster: Cluster) -> None:
    async with store_at(cluster, call_timeout_s=1.5) as store:
        owner = (await create(store, a_session())).ownership
        for node in cluster.nodes:
            node.kill()
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.renew(owner)


class Silent:
    def __init__(self) -> None:
        self.met = 0
        self._open: list[asyncio.StreamWriter] = []

    async def meet(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.met += 1
        self._open.append(writer)

    def hang_up(self) -> None:
        for writer in self._open:
            writer.close()


@asynccontextmanager
async def silent() -> AsyncIterator[tuple[Silent, str]]:
    result = Silent()
    async with await asyncio.start_server(result.meet, "127.0.0.1", 0) as server:
        yield result, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        result.hang_up()


@pytest.mark.parametrize("form", ["redis+cluster://{}", "redis+sentinel://{}/0?service=galley"])
async def test_concurrent_calls_share_one_lookup_of_nodes(form: str) -> None:
    async with silent() as (server, at), store_at(form.format(at), call_timeout_s=0.2) as store:
        for looks in (1, 2):
            calls = [asyncio.create_task(claim(store, f"{number:032x}", ALICE)) for number in range(24)]
            await asyncio.sleep(0)
            for call in calls[::3]:
                call.cancel()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(outcome) for outcome in outcomes} == {StoreUnavailable, asyncio.CancelledError}
            assert server.met == looks


async def test_a_lost_master_is_unavailable_until_failover(watched: ReplicaSet) -> None:
    async with store_at(watched, call_timeout_s=1.5) as store:
        owner = (await create(store, a_session())).ownership
        await copied(watched, owner, [1])
        watched.master.kill()
        with pytest.raises(StoreUnavailable):
            await commit(store, owner, 4, [2], b".")
        assert await in_time(lambda: commit(store, owner, 4, [2], b".")) == 5
        watched.master.start()
        async with store_at(watched) as another:
            assert await in_time(lambda: commit(another, owner, 5, [3], b".")) == 6
        await must_hold(store, owner, [1, 2, 3])


async def test_an_owner_commits_again_what_a_failover_lost(watched: ReplicaSet) -> None:
    async with store_at(watched, call_timeout_s=1.5) as store:
        owner = (await create(store, a_session())).ownership
        await copied(watched, owner, [1])
        watched.replica.pause()
        assert await watched.master.command("CLIENT", "KILL", "TYPE", "replica") == 1
        assert await commit(store, owner, 4, [2, 3], b"..") == 6
        watched.master.kill()
        watched.replica.go_on()

        async def have() -> int:
            try:
                return await commit(store, owner, 6, [4], b".")
            except LogBehind as behind:
                return -behind.have

        assert await in_time(have) == -4
        assert await commit(store, owner, 4, [2, 3, 4], b"...") == 7
        await must_hold(store, owner, [1, 2, 3, 4])


@asynccontextmanager
async def waiting(pair: ReplicaSet) -> AsyncIterator[RedisStore]:
    async with store_at(pair, copies=Copies(1, 0.1)) as store:
        yield store


async def test_a_change_counts_once_replicas_have_it(pair: ReplicaSet) -> None:
    async with store_at(pair) as store:
        owner = (await create(store, a_session())).ownership
        pair.replica.pause()
        changes: list[Callable[[RedisStore], Awaitable[Any]]] = [
            lambda store: commit(store, owner, 3, [1, 2], b".."),
            lambda store: store.renew(owner),
            lambda store: claim(store, owner.session_id, ALICE, nonce=owner.nonce),
            lambda store: finish(store, owner, 5, b"end"),
            lambda store: abort(store, owner.session_id, ALICE, b"aborted"),
        ]
        for change in changes:
            for _ in range(2):
                async with waiting(pair) as another:
                    with pytest.raises(StoreUnavailable, match="replicas"):
                        await change(another)
        pair.replica.go_on()
        async with waiting(pair) as careful:
            await in_time(lambda: _finished(careful, owner))
        seen = await claim(store, owner.session_id, ALICE)
        assert (seen.tokens, seen.meta, seen.finish) == ([*PROMPT, 1, 2], b"..", b"end")


async def _finished(store: RedisStore, owner: Ownership) -> int:
    await finish(store, owner, 5, b"end")
    return 5


async def test_a_refusal_waits_for_no_replica(pair: ReplicaSet) -> None:
    async with store_at(pair) as store:
        owner = (await create(store, a_session())).ownership
        pair.replica.pause()
        async with waiting(pair) as careful:
            with pytest.raises(LogBehind):
                await commit(careful, owner, 5, [1], b".")
        pair.replica.go_on()

"""The spool of finished sessions, on real servers: bounded, apart by principal, and gone when it must be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from galley.common.registry import spool as module
from galley.common.registry.spool import LATEST_ADD_S, LearningSpool, SpooledSession
from galley.core.errors import StoreUnavailable
from tests.fakes.redis_clusters import Cluster, until
from tests.fakes.redis_servers import VALKEY, Server, running
from tests.fakes.relay import Relay
from tests.fakes.waiting import PATIENCE_S
from tests.integration.galley.common.test_trials import ChangesHeld, scripts_run

ALICE, BOB = "alice", "jwt:bob@example.com"
MOST = 10_000


@pytest.fixture
async def spool(server: Server | Cluster) -> AsyncIterator[LearningSpool]:
    spool = LearningSpool(server.url, "pool")
    yield spool
    await spool.close()


def session(number: int, *, length: int = 100) -> SpooledSession:
    tokens = [number, *range(length - 1)]
    return SpooledSession(f"{number:032x}", "chat", 0.5, 7, tokens)


async def held(spool: LearningSpool, principal: str) -> list[SpooledSession]:
    return await spool.read(principal, await spool.sessions(principal))


async def test_sessions_are_read_as_they_were_the_newest_first(spool: LearningSpool) -> None:
    for number in (1, 2, 70_000):
        assert await spool.add(ALICE, session(number), MOST)
    assert await held(spool, ALICE) == [session(70_000), session(2), session(1)]
    assert not await spool.add(ALICE, session(2), MOST), "it is there already"
    assert len(await held(spool, ALICE)) == 3


async def test_each_principal_has_its_own_sessions(spool: LearningSpool) -> None:
    await spool.add(ALICE, session(1), MOST)
    await spool.add(BOB, session(2), MOST)
    assert await spool.principals() == [ALICE, BOB]
    assert await held(spool, BOB) == [session(2)]
    assert await spool.read(BOB, [session(1).session_id]) == []
    assert not await spool.remove(BOB, session(1).session_id, is_recent=False)
    assert await held(spool, ALICE) == [session(1)]


async def test_the_newest_sessions_are_kept(spool: LearningSpool) -> None:
    for number in range(40):
        await spool.add(ALICE, session(number), 1000)
    await spool.add(BOB, session(99), 1000)
    assert [one.tokens[0] for one in await held(spool, ALICE)] == list(range(39, 30, -1))
    assert not await spool.add(ALICE, session(50, length=1001), 1000)
    await spool.add(ALICE, session(51, length=900), 1000)
    assert [one.tokens[0] for one in await held(spool, ALICE)] == [51]
    assert len(await held(spool, BOB)) == 1


async def test_a_removed_session_makes_room_and_is_not_added_late(spool: LearningSpool) -> None:
    for number in range(9):
        await spool.add(ALICE, session(number), 1000)
    assert await spool.remove(ALICE, session(0).session_id, is_recent=True)
    assert not await spool.add(ALICE, session(0), 1000)
    assert await spool.add(ALICE, session(9), 1000)
    assert [one.tokens[0] for one in await held(spool, ALICE)] == list(range(9, 0, -1))
    assert not await spool.remove(ALICE, session(20).session_id, is_recent=True)
    assert not await spool.add(ALICE, session(20), 1000), "it was under way when it was deleted"
    await spool.remove(ALICE, session(21).session_id, is_recent=False)
    assert await spool.add(ALICE, session(21), 1000)


async def test_a_session_that_ended_long_ago_is_not_added(spool: LearningSpool) -> None:
    now_s = asyncio.get_running_loop().time()
    assert not await spool.add(ALICE, session(1), MOST, ended_s=now_s - LATEST_ADD_S)
    assert await spool.add(ALICE, session(1), MOST, ended_s=now_s - LATEST_ADD_S + PATIENCE_S)


async def test_an_add_that_a_cut_link_held_until_after_a_deletion_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link, late = ChangesHeld(), session(2)
    with running(VALKEY) as server:
        async with Relay(server.url.removeprefix("unix://"), link) as relay:
            cut_off, spool = LearningSpool(f"redis://{relay.address}"), LearningSpool(server.url)
            assert await cut_off.add(ALICE, session(1), MOST)
            monkeypatch.setattr(module, "LATEST_ADD_S", 0.1)
            monkeypatch.setattr(module, "_TOMBSTONE_MS", 200)

            link.holds = True
            with pytest.raises(StoreUnavailable):
                await cut_off.add(ALICE, late, MOST)
            await spool.remove(ALICE, late.session_id, is_recent=True)

            async def is_mark_gone() -> bool:
                return not await server.command("KEYS", "*:deleted:*")

            await until(is_mark_gone)
            run_before = await scripts_run(server)
            link.holds = False
            link.mend()

            async def has_arrived() -> bool:
                return await scripts_run(server) > run_before

            await until(has_arrived)
            assert await held(spool, ALICE) == [session(1)]
            await cut_off.close()
            await spool.close()


async def test_a_forgotten_principal_leaves_nothing(server: Server | Cluster, spool: LearningSpool) -> None:
    for number in range(5):
        await spool.add(ALICE, session(number), MOST)
    await spool.add(BOB, session(7), MOST)
    assert await spool.forget(ALICE) == 5
    assert await spool.principals() == [BOB]
    assert await held(spool, ALICE) == []
    assert await held(spool, BOB) == [session(7)]
    assert not await spool.add(ALICE, session(8), MOST), "it was under way"
    await spool.forget(BOB)
    left = await server.command("KEYS", "*")
    assert {key.decode().split("}:")[1].split(":")[0] for key in left} == {"forgotten"}
    assert await spool.forget("nobody") == 0


async def test_many_sessions_are_forgotten_in_parts(server: Server | Cluster, spool: LearningSpool) -> None:
    """Redis serves sessions in progress meanwhile, so no part holds it for long."""
    await asyncio.gather(*(spool.add(ALICE, session(number, length=4), MOST) for number in range(512)))
    assert await spool.forget(ALICE) == 512
    left = await server.command("KEYS", "*")
    assert [key.decode().split("}:")[1].split(":")[0] for key in left] == ["forgotten"]


async def test_all_of_it_expires(server: Server | Cluster) -> None:
    spool = LearningSpool(server.url, "pool", ttl_s=1.0)
    await spool.add(ALICE, session(1), MOST)
    assert len(await held(spool, ALICE)) == 1

    async def is_empty() -> bool:
        return not await server.command("KEYS", "*")

    await until(is_empty)
    assert await held(spool, ALICE) == []
    await spool.close()


async def test_old_sessions_go_while_new_ones_come(server: Server | Cluster) -> None:
    spool = LearningSpool(server.url, "pool", ttl_s=0.5)
    await spool.add(ALICE, session(1), 250)
    number = 2

    async def first_is_gone() -> bool:
        nonlocal number
        number += 1
        await spool.add(ALICE, session(number, length=20), 250)
        return session(1).session_id not in await spool.sessions(ALICE)

    await until(first_is_gone)
    assert await spool.add(ALICE, session(1), 250)
    await spool.close()


@pytest.mark.parametrize(
    "entry", ["", "\x02" + "\0" * 60, "\x01\x7f\x7f", "\0" * 7, "\x01" + "\0" * 10 + "abc"]
)
async def test_a_damaged_entry_is_passed_over(
    server: Server | Cluster, spool: LearningSpool, entry: str
) -> None:
    for number in (1, 2):
        await spool.add(ALICE, session(number), MOST)
    await server.command("SET", f"galley:learning:{{pool}}:entry:{session(1).session_id}:{ALICE}", entry)
    assert await held(spool, ALICE) == [session(2)]


async def test_many_sessions_are_listed_and_read_in_parts(spool: LearningSpool) -> None:
    await asyncio.gather(*(spool.add(ALICE, session(number, length=9), MOST) for number in range(150)))
    assert sorted(one.tokens[0] for one in await held(spool, ALICE)) == list(range(150))
    whole = await spool.sessions(ALICE)
    parts = [await spool.sessions(ALICE, first, 64) for first in (0, 64, 128, 192)]
    assert [one for part in parts for one in part] == whole
    assert [len(part) for part in parts] == [64, 64, 22, 0]

"""Which finished sessions a gateway keeps to train drafts on: opted in, apart by principal, and deletable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.registry.spool import LearningSpool
from galley.common.server.server import Parts
from galley.core.content import token_bytes
from tests.fakes.http_client import http_client
from tests.fakes.readings import number
from tests.fakes.redis_clusters import until
from tests.fakes.redis_servers import Server
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import PROMPT_TOKENS, World, must_be_true, receive
from tests.integration.services.gateway.callers import ALICE, BOB, KeyFile, calling

LEARN = 100_000
RESPONSES = "/v1/responses"


@pytest.fixture
async def spool(world: World) -> AsyncIterator[LearningSpool]:
    spool = LearningSpool(world.redis_url, world.id)
    yield spool
    await spool.close()


async def kept(spool: LearningSpool, principal: str, count: int) -> list[str]:
    """Return the ids of a principal's sessions once there are `count`."""

    async def is_there() -> bool:
        return len(await spool.sessions(principal)) == count

    await until(is_there)
    return await spool.sessions(principal)


async def test_a_finished_session_is_kept_as_token_ids(world: World, spool: LearningSpool) -> None:
    gateway = await world.gateway(learn_tokens=LEARN, pool=world.id)
    received = await receive(gateway.generate(workload="chat", temperature=0.5))
    [session] = await spool.read("anonymous", await kept(spool, "anonymous", 1))
    assert session.tokens == [*PROMPT_TOKENS, *received.tokens]
    assert (session.prompt_len, session.workload) == (len(PROMPT_TOKENS), "chat")
    assert session.temperature == 0.5
    assert received.started is not None
    assert session.session_id == received.started.session_id


async def test_nothing_is_kept_by_default(world: World, spool: LearningSpool) -> None:
    gateway = await world.gateway(pool=world.id)
    must_be_true(await receive(gateway.generate()))
    await gateway.idle()
    assert await spool.principals() == []


async def test_only_principals_that_allow_it_are_learned_from(world: World, spool: LearningSpool) -> None:
    keys = KeyFile(alice="learn = true").write(world)
    gateway = await world.gateway(learn_tokens=LEARN, pool=world.id, api_keys_file=keys)
    async with calling(gateway, BOB) as bob, calling(gateway, ALICE) as alice:
        must_be_true(await receive(bob.generate()))
        must_be_true(await receive(alice.generate()))
    await kept(spool, "alice", 1)
    assert await spool.principals() == ["alice"]


async def test_text_and_other_principals_are_nowhere_in_what_is_kept_and_exported(
    world: World, spool: LearningSpool, shared_store: Server
) -> None:
    registry, words = Registry(GATEWAY), "A sentence that nobody else says."
    keys = KeyFile(alice="learn = true").write(world)
    gateway = await world.gateway_of(
        Parts(metrics=registry), learn_tokens=LEARN, pool=world.id, api_keys_file=keys
    )
    with capture_logs() as logs:
        async with calling(gateway, BOB) as bob, calling(gateway, ALICE) as alice:
            others = await receive(bob.generate(words, workload="bobs"))
            await receive(alice.generate(words, workload="alices"))
        await kept(spool, "alice", 1)
    names = [key.decode() for key in await shared_store.command("KEYS", f"galley:learning:{{{world.id}}}*")]
    entries = [await shared_store.command("GET", name) for name in names if ":entry:" in name]
    assert len(entries) == 1
    held = b"".join(entries)
    exported = f"{logs}{[reading.points for reading in registry.read()]}"
    assert others.started is not None
    for of_bob in ("bob", others.started.session_id):
        assert not any(of_bob in name for name in names)
    for written in (words, "bobs", others.started.session_id):
        assert written.encode() not in held
    assert words not in exported
    assert token_bytes(others.tokens[:6]) not in exported.encode()
    assert str(others.tokens[:6])[1:-1] not in exported


async def test_a_session_that_did_not_end_here_is_not_kept(world: World, spool: LearningSpool) -> None:
    gateway = await world.gateway(learn_tokens=LEARN, pool=world.id)
    received = await receive(gateway.generate())
    await kept(spool, "anonymous", 1)
    assert received.started is not None
    await spool.remove("anonymous", received.started.session_id, is_recent=False)
    again = await receive(gateway.client.resume(received.started.session_id, 0))
    assert again.tokens == received.tokens
    stream, aborted = await world.held(gateway, 2)
    assert aborted.started is not None
    await gateway.client.abort(aborted.started.session_id)
    world.target.gate.open()
    await receive(stream, first_index=len(aborted.tokens))
    must_be_true(await receive(gateway.generate()))
    [last] = await kept(spool, "anonymous", 1)
    assert last not in {received.started.session_id, aborted.started.session_id}


async def test_a_deleted_response_is_not_learned_from(
    world: World, spool: LearningSpool, shared_store: Server
) -> None:
    gateway = await world.gateway(learn_tokens=LEARN, pool=world.id, http_port=0)
    async with http_client(gateway.http) as client:
        body = {"model": "tiny", "input": "Hello.", "max_output_tokens": 5}
        ids = [(await client.raw.post(RESPONSES, json=body)).json()["id"] for _ in range(3)]
        private = (await client.raw.post(RESPONSES, json=body | {"store": False})).json()
        assert private["status"] == "incomplete"
        sessions = await kept(spool, "anonymous", 3)
        assert {f"resp_{one}" for one in sessions} == set(ids)
        assert (await client.raw.delete(f"{RESPONSES}/{ids[0]}")).status_code == 200
        assert len(await spool.sessions("anonymous")) == 2
        # The store's session may have expired before the spool's.
        await shared_store.command("DEL", f"galley:sessions:{world.id}:{{{ids[1][5:]}}}")
        assert (await client.raw.delete(f"{RESPONSES}/{ids[1]}")).status_code == 404
        assert [f"resp_{one}" for one in await spool.sessions("anonymous")] == [ids[2]]


async def test_a_spool_that_is_away_costs_sessions_nothing(frail_world: World, own_store: Server) -> None:
    registry = Registry(GATEWAY)
    gateway = await frail_world.gateway_of(Parts(metrics=registry), learn_tokens=LEARN, pool=frail_world.id)
    await own_store.command("SET", f"galley:learning:{{{frail_world.id}}}:principals", "no sorted set")
    async with asyncio.timeout(PATIENCE_S):
        must_be_true(await receive(gateway.generate()))

        async def is_dropped() -> bool:
            return number(registry, catalogue.LEARNING_SESSIONS, "dropped") == 1

        await until(is_dropped)
    await own_store.command("DEL", f"galley:learning:{{{frail_world.id}}}:principals")
    must_be_true(await receive(gateway.generate()))

    async def is_kept() -> bool:
        return number(registry, catalogue.LEARNING_SESSIONS, "kept") == 1

    await until(is_kept)

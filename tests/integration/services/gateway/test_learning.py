"""Which finished sessions a gateway keeps to train drafts on: opted in, apart by principal, and deletable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.registry.spool import LearningSpool
from galley.common.registry.trials import DraftVersions
from galley.common.server.server import Parts
from galley.core.content import prefix_hash, token_bytes, tokens_from_bytes
from galley.core.errors import StoreUnavailable
from services.gateway.auth import authentication
from tests.fakes.changed_logs import change
from tests.fakes.http_client import http_client
from tests.fakes.readings import number
from tests.fakes.redis_clusters import until
from tests.fakes.redis_servers import Server
from tests.fakes.spans import KeptSpans
from tests.fakes.stored import stored, written
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


async def test_a_stream_that_ends_after_its_principal_took_learn_back_is_not_kept(
    world: World, spool: LearningSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "CHECK_INTERVAL_S", 0.0)
    both = KeyFile(alice="learn = true", bob="learn = true")
    gateway = await world.gateway(learn_tokens=LEARN, pool=world.id, api_keys_file=both.write(world))
    async with calling(gateway, BOB) as bob, calling(gateway, ALICE) as alice:
        stream, received = await world.held(alice, 2)
        KeyFile(bob="learn = true").write(world)
        world.target.gate.open()
        await receive(stream, first_index=len(received.tokens))
        must_be_true(await receive(bob.generate()))
    await kept(spool, "bob", 1)
    assert await spool.principals() == ["bob"], "sessions are added in the order of their ends"


async def test_text_and_tokens_are_nowhere_but_in_the_session_and_the_spool_of_its_principal(
    frail_world: World, own_store: Server
) -> None:
    """Read all that a gateway stores and exports while it learns, audits, and tries a draft."""
    world, words = frail_world, "A sentence that nobody else says."
    registry, spans = Registry(GATEWAY), KeptSpans()
    keys = KeyFile(alice="learn = true").write(world)
    spool, versions = LearningSpool(own_store.url, world.id), DraftVersions(own_store.url, world.id)
    await versions.try_version("v2", 0.5)
    gateway = await world.gateway_of(
        spans.parts(metrics=registry), learn_tokens=LEARN, pool=world.id, api_keys_file=keys, audit_ratio=1
    )
    with capture_logs() as logs:
        async with calling(gateway, BOB) as bob, calling(gateway, ALICE) as alice:
            answers = [
                await receive(bob.generate(f"Bob: {words}", workload="bobs")),
                await receive(alice.generate(words, workload="alices")),
            ]
            ids = [answer.started.session_id for answer in answers if answer.started is not None]
            await until(lambda: _is_audited(registry, 2))
            # The answer to another seed: the audit finds an incident.
            await _plant_difference(own_store, ids[1])
            assert (await alice.client.audit(ids[1])).differing
        await kept(spool, "alice", 1)
    world.expect_error("audit found an incident")
    held = await stored(own_store)
    assert {key.partition("{")[0] for key in held} >= {"galley:learning:", "galley:drafts:", "galley:audit:"}
    sessions = {key for key in held if key.startswith("galley:sessions:")}
    [entry] = [key for key in held if ":entry:" in key]
    assert entry.endswith(f":entry:{ids[1]}:alice")
    told = b"\n".join(value for key, value in held.items() if key not in {*sessions, entry})
    told += f"{logs}{[reading.points for reading in registry.read()]}".encode()
    told += "".join(span.to_json() for span in spans.spans).encode()
    assert any(form in held[entry] for form in written(answers[1].tokens[:6])), "else nothing would be found"
    for answer in answers:
        assert not any(form in told for form in written(answer.tokens[:6]))
        assert answer.text not in told.decode(errors="replace")
    assert words.encode() not in told + held[entry]
    assert answers[1].text.encode() not in held[entry]
    learned = b"\n".join(value for key, value in held.items() if key.startswith("galley:learning:"))
    for of_bob in (b"bob", ids[0].encode(), token_bytes(answers[0].tokens[:6])):
        assert of_bob not in learned
    assert await spool.forget("alice") == 1
    left = [key for key in await stored(own_store) if key.startswith("galley:learning:")]
    assert left == [f"galley:learning:{{{world.id}}}:forgotten:alice"]
    await spool.close()
    await versions.close()


async def _is_audited(registry: Registry, sessions: int) -> bool:
    return number(registry, catalogue.AUDIT_SESSIONS, "same") == sessions


async def _plant_difference(server: Server, session_id: str) -> None:
    """Flip the last token of a session in the store, and change its hash to match."""
    async with server.raw() as raw:
        [key] = [key async for key in raw.scan_iter(f"galley:sessions:*{{{session_id}}}")]
        tokens = tokens_from_bytes(cast("bytes", await raw.get(key.decode() + ":log")))
        tokens[-1] ^= 1
        await raw.set(key.decode() + ":log", token_bytes(tokens))
        await raw.hset(key, "log_hash", prefix_hash(tokens))


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
        assert private["status"] in {"completed", "incomplete"}  # by the seed that was drawn
        sessions = await kept(spool, "anonymous", 3)
        assert {f"resp_{one}" for one in sessions} == set(ids)
        assert (await client.raw.delete(f"{RESPONSES}/{ids[0]}")).status_code == 200
        assert len(await spool.sessions("anonymous")) == 2
        # The store's session may have expired before the spool's.
        await shared_store.command("DEL", f"galley:sessions:{world.id}:{{{ids[1][5:]}}}")
        assert (await client.raw.delete(f"{RESPONSES}/{ids[1]}")).status_code == 404
        assert [f"resp_{one}" for one in await spool.sessions("anonymous")] == [ids[2]]


async def test_a_response_whose_deletion_is_repeated_is_not_learned_from(
    world: World, spool: LearningSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spool fails at first, and gets the session last."""
    add, remove, errors = LearningSpool.add, LearningSpool.remove, [StoreUnavailable("redis")]
    is_deleted, added = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def late(self: LearningSpool, *given: Any, **options: Any) -> bool:
        await is_deleted.wait()
        added.set_result(is_added := await add(self, *given, **options))
        return is_added

    async def failing(self: LearningSpool, *given: Any, **options: Any) -> bool:
        if errors:
            raise errors.pop()
        return await remove(self, *given, **options)

    monkeypatch.setattr(LearningSpool, "add", late)
    monkeypatch.setattr(LearningSpool, "remove", failing)
    gateway = await world.gateway(learn_tokens=LEARN, pool=world.id, http_port=0)
    async with http_client(gateway.http) as client:
        body = {"model": "tiny", "input": "Hello.", "max_output_tokens": 5}
        response_id = (await client.raw.post(RESPONSES, json=body)).json()["id"]
        assert (await client.raw.delete(f"{RESPONSES}/{response_id}")).status_code == 503
        await client.raw.delete(f"{RESPONSES}/{response_id}")
        assert (await client.raw.get(f"{RESPONSES}/{response_id}")).status_code == 404
    is_deleted.set()
    async with asyncio.timeout(PATIENCE_S):
        assert not await added
    assert await spool.sessions("anonymous") == []


async def test_a_damaged_response_can_be_removed_from_what_is_learned(
    world: World, spool: LearningSpool, shared_store: Server
) -> None:
    gateway = await world.gateway(learn_tokens=LEARN, pool=world.id, http_port=0)
    async with http_client(gateway.http) as client:
        body = {"model": "tiny", "input": "Hello.", "max_output_tokens": 5}
        response_id = (await client.raw.post(RESPONSES, json=body)).json()["id"]
        [session_id] = await kept(spool, "anonymous", 1)
        async with shared_store.raw() as raw:
            await change(raw, session_id, "an output token is flipped")
        deleted = await client.raw.delete(f"{RESPONSES}/{response_id}")
        assert (deleted.status_code, deleted.json()["error"]["code"]) == (500, "data_loss")
    assert await spool.sessions("anonymous") == []


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

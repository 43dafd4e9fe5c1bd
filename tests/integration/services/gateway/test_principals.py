"""Callers are told apart: what is one's own nobody else sees, names, shares or uses up."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from galley.client.errors import GalleyRpcError
from galley.client.options import Speculation
from galley.common.tls import files
from galley.core.answer.answer import SessionSpec
from galley.core.content import HASH_BYTES
from services.gateway.auth import authentication
from services.gateway.request.validate import parse_generate
from services.gateway.versions import keeper
from tests.fakes.log_lines import logged
from tests.fakes.redis_servers import Server
from tests.fakes.truth import CONTEXT, true_output
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import (
    MAX_TOKENS,
    PROMPT_TOKENS,
    Gateway,
    Received,
    World,
    field_of,
    must_be_true,
    receive,
    refused,
)
from tests.integration.services.gateway.callers import ALICE, BOB, KeyFile, calling

UNKNOWN = "0" * 32


@pytest.fixture
def key_file() -> KeyFile:
    return KeyFile()


@pytest.fixture
async def gateway(world: World, key_file: KeyFile) -> Gateway:
    return await limiting(world, key_file)


async def limiting(world: World, key_file: KeyFile) -> Gateway:
    """Return a gateway of the test's own pool: the pool's gateways share the token budgets."""
    pool = f"test-{world.id}"
    return await world.gateway(api_keys_file=key_file.write(world), max_sessions=4, pool=pool)


@pytest.fixture
async def alice(gateway: Gateway) -> AsyncIterator[Gateway]:
    async with calling(gateway, ALICE) as caller:
        yield caller


@pytest.fixture
async def bob(gateway: Gateway) -> AsyncIterator[Gateway]:
    async with calling(gateway, BOB) as caller:
        yield caller


async def test_no_call_is_served_without_a_known_key(world: World, gateway: Gateway) -> None:
    for key in ("", ALICE + "x"):
        async with calling(gateway, key) as caller:
            calls = (
                receive(caller.generate()),
                receive(caller.client.resume(UNKNOWN, 0)),
                caller.client.abort(UNKNOWN),
                caller.client.model_info(),
            )
            for call in calls:
                error = await refused(call)
                assert error.code is grpc.StatusCode.UNAUTHENTICATED
                assert ALICE not in str(error)
    assert not world.target.calls


async def test_health_and_reflection_stay_open(gateway: Gateway) -> None:
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        [reported] = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
        assert reported.list_services_response.service


def remove(path: str) -> None:
    Path(path).unlink()


async def test_a_fifo_in_place_of_the_keys_file_stops_no_call(
    world: World, key_file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authentication, "CHECK_INTERVAL_S", 0.0)
    monkeypatch.setattr(files, "_CHECK_PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(authentication, "CALL_PATIENCE_S", PATIENCE_S)
    path = key_file.write(world)
    gateway = await world.gateway(api_keys_file=path)
    remove(path)
    os.mkfifo(path)
    async with calling(gateway, ALICE) as alice, asyncio.timeout(PATIENCE_S):
        with logged(files) as logs:
            must_be_true(await receive(alice.generate()))
        assert [line["error"] for line in logs] == [f"api_keys_file: {path}: must be a regular file"]
        world.expect_error("files not reloaded")
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        remove(path)
        KeyFile(alice="max_priority = 2").write(world)
        must_be_true(await receive(alice.generate(priority=2)))


async def test_session_of_another_principal_is_not_found(world: World, alice: Gateway, bob: Gateway) -> None:
    stream, received = await world.held(alice, 1)
    for session_id in (stream.session_id, UNKNOWN):
        for call in (receive(bob.client.resume(session_id, 1)), bob.client.abort(session_id)):
            error = await refused(call)
            assert error.code is grpc.StatusCode.NOT_FOUND
            assert error.message == f"session_id: no session {session_id!r}"
    world.target.gate.open()
    must_be_true(await received.listen(stream))
    error = await refused(receive(bob.client.resume(stream.session_id, 0)))
    assert error.code is grpc.StatusCode.NOT_FOUND
    must_be_true(await receive(alice.client.resume(stream.session_id, 0)))


@pytest.fixture(autouse=True)
def unread_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have gateways read the versions of drafts only when they start: tests count the store's commands."""
    monkeypatch.setattr(keeper, "READ_S", 3600.0)


async def requests_of(store: Server) -> dict[str, int]:
    stats: dict[bytes | str, dict[str, int]] = await store.command("INFO", "commandstats")
    return {str(name): reported["calls"] for name, reported in stats.items() if "info" not in str(name)}


async def test_session_of_another_principal_costs_the_store_the_same(
    world: World, shared_store: Server, alice: Gateway, bob: Gateway
) -> None:
    stream = alice.generate()
    must_be_true(await receive(stream))
    await alice.idle()
    for call in (lambda of: receive(bob.client.resume(of, 0)), bob.client.abort):
        requests = []
        for session_id in (UNKNOWN, stream.session_id, UNKNOWN, stream.session_id):
            before = await requests_of(shared_store)
            assert (await refused(call(session_id))).code is grpc.StatusCode.NOT_FOUND
            after = await requests_of(shared_store)
            requests.append({name: after[name] - before.get(name, 0) for name in after})
        assert requests[0] == requests[1] == requests[2] == requests[3]
        assert sum(requests[0].values()) > 0
    calls = len(world.target.calls)
    must_be_true(await receive(alice.client.resume(stream.session_id, 0)))
    assert len(world.target.calls) == calls


async def test_idempotency_key_of_another_principal_looks_unused(
    world: World, alice: Gateway, bob: Gateway
) -> None:
    key = f"key-{world.id}-anothers"
    must_be_true(await receive(alice.generate(idempotency_key=key)))
    stream = bob.generate("Another body.", idempotency_key=key)
    await receive(stream)
    assert stream.session_id
    assert (await refused(receive(alice.generate("A third.", idempotency_key=key)))).code is (
        grpc.StatusCode.ALREADY_EXISTS
    )


async def test_an_idempotency_key_belongs_to_its_caller(world: World, alice: Gateway, bob: Gateway) -> None:
    key = f"key-{world.id}"
    ids = []
    for caller in (alice, bob, alice):
        stream = caller.generate(idempotency_key=key)
        must_be_true(await receive(stream))
        ids.append(stream.session_id)
    assert ids[0] == ids[2] != ids[1]


async def test_the_pools_receive_the_callers_salt(world: World, alice: Gateway, bob: Gateway) -> None:
    plain, second = await world.gateway(), await world.gateway()
    other = await world.gateway(id_secret="another")
    salts = []
    for caller in (alice, bob, plain, other, second, alice):
        before = len(world.target.calls), len(world.draft.calls)
        must_be_true(await receive(caller.generate()))
        calls = [*world.target.calls[before[0] :], *world.draft.calls[before[1] :]]
        [salt] = {call.slice.tenant_salt for call in calls}
        salts.append(salt)
    assert len({*salts[:4], b""}) == 5, "no guess is the salt of an unauthenticated caller either"
    assert salts[4:] == [salts[2], salts[0]], "gateways of one secret share caches"


@pytest.mark.parametrize("key_file", [KeyFile(alice="max_priority = 2")])
async def test_a_priority_above_the_callers_is_refused(world: World, alice: Gateway, bob: Gateway) -> None:
    for caller, most in ((alice, 2), (bob, 0)):
        error = await refused(receive(caller.generate(priority=most + 1)))
        assert (error.code, field_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "priority")
        assert not world.target.calls
    for caller, priority in ((alice, 2), (bob, 0), (bob, -5)):
        must_be_true(await receive(caller.generate(priority=priority)))
        assert world.target.calls[-1].slice.priority == priority
        world.target.calls.clear()


@pytest.mark.parametrize("key_file", [KeyFile(alice="max_sessions = 1")])
async def test_the_callers_own_streams_are_bounded(world: World, alice: Gateway, bob: Gateway) -> None:
    world.target.gate.close()
    stream = alice.generate()
    await anext(stream)
    error = await refused(receive(alice.generate()))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.retry_after_s
    assert "1 streams of alice" in error.message
    world.target.gate.open()
    must_be_true(await receive(bob.generate()))
    stream.cancel()
    await alice.idle()
    must_be_true(await receive(alice.generate()))


@pytest.mark.parametrize("key_file", [KeyFile(alice="tokens_per_s = 0.001\nburst_tokens = 100")])
async def test_a_refused_prompt_costs_the_tokens_that_were_made_of_it(world: World, alice: Gateway) -> None:
    error = await refused(receive(alice.generate("a" * 60, max_tokens=CONTEXT - 1)))
    assert field_of(error) == "max_tokens"
    error = await refused(receive(alice.generate(max_tokens=41)))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    must_be_true(await receive(alice.generate(max_tokens=40)))


@pytest.mark.parametrize("key_file", [KeyFile(alice="tokens_per_s = 0.001\nburst_tokens = 100")])
async def test_a_prediction_costs_its_tokens(alice: Gateway) -> None:
    must_be_true(await receive(alice.generate(prediction=[5] * 20)))
    await alice.idle()
    left = 100 - len(PROMPT_TOKENS) - 20 - MAX_TOKENS
    error = await refused(receive(alice.generate(max_tokens=left + 1)))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    must_be_true(await receive(alice.generate(max_tokens=left)), left)


@pytest.mark.parametrize("key_file", [KeyFile(alice="tokens_per_s = 20\nburst_tokens = 60")])
async def test_a_caller_out_of_tokens_learns_when_to_retry(
    world: World, alice: Gateway, bob: Gateway
) -> None:
    must_be_true(await receive(alice.generate()))
    calls = len(world.target.calls)
    error = await refused(receive(alice.generate()))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "20 tokens per second" in error.message
    assert len(world.target.calls) == calls, "nothing was done"
    must_be_true(await receive(bob.generate()))
    assert error.retry_after_s is not None
    await asyncio.sleep(error.retry_after_s)
    must_be_true(await receive(alice.generate()))


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("key_file", [KeyFile(alice="tokens_per_s = 0.001\nburst_tokens = 100")])
async def test_a_replay_costs_the_tokens_that_are_read_again(
    world: World, alice: Gateway, resumed: bool
) -> None:
    key = f"key-{world.id}-{resumed}"
    stream = alice.generate(idempotency_key=key)
    must_be_true(await receive(stream))
    await alice.idle()
    again = alice.client.resume(stream.session_id, 0) if resumed else alice.generate(idempotency_key=key)
    must_be_true(await receive(again))
    await alice.idle()
    left = 100 - len(PROMPT_TOKENS) - MAX_TOKENS - MAX_TOKENS
    error = await refused(receive(alice.generate(max_tokens=left + 1)))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    must_be_true(await receive(alice.generate(max_tokens=left)), left)


@pytest.mark.parametrize("key_file", [KeyFile(alice="tokens_per_s = 0.001\nburst_tokens = 100")])
async def test_a_joined_session_costs_its_prompt_once(world: World, alice: Gateway) -> None:
    key = f"key-{world.id}-joined"
    world.target.gate.close()
    first = alice.generate(idempotency_key=key)
    await anext(first)
    second = alice.generate(idempotency_key=key)
    await anext(second)
    assert (await refused(receive(first))).code is grpc.StatusCode.FAILED_PRECONDITION
    world.target.gate.open()
    must_be_true(await receive(second))
    await alice.idle()
    must_be_true(await receive(alice.generate(max_tokens=100 - 53)), 100 - 53)


@pytest.mark.parametrize("key_file", [KeyFile(alice="tokens_per_s = 0.001\nburst_tokens = 60")])
async def test_resumed_answers_keep_the_rate(world: World, alice: Gateway) -> None:
    """Cancelled answers cost little; their resumes must not get the rest for nothing."""
    begun = []
    for count in range(1, 9):
        stream, received = await world.held(alice, 1, "x", speculation=Speculation(off=True))
        begun.append((stream, received))
        # Its second request must not take the gate's permit for the next stream's first.
        await world.target.waits_after(count)
        stream.cancel()
        await world.target.was_cancelled(count)
        await alice.idle()
    world.target.gate.open()
    for stream, received in begun:
        with suppress(GalleyRpcError):
            await received.listen(alice.client.resume_stream(stream))
    assert sum(len(received.tokens) for _, received in begun) <= 60
    assert len(begun[0][1].tokens) == MAX_TOKENS, "the budget covered this one"


@pytest.mark.parametrize("key_file", [KeyFile(alice="tokens_per_s = 0.001\nburst_tokens = 60")])
async def test_a_resume_beyond_the_budget_changes_nothing(world: World, alice: Gateway) -> None:
    prompt = "x" * 10
    stream, received = await world.held(alice, 1, prompt, speculation=Speculation(off=True))
    error = await refused(receive(alice.client.resume(stream.session_id, 1)))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "39 tokens (0.001 tokens per second)" in error.message
    assert error.retry_after_s
    world.target.gate.open()
    await received.listen(stream)
    assert received.tokens == true_output(list(prompt.encode()), MAX_TOKENS), "its owner went on"
    again = await receive(alice.client.resume(stream.session_id, 1), first_index=1)
    assert len(again.tokens) == MAX_TOKENS - 1, "a finished answer reserves nothing"


@pytest.mark.parametrize("key_file", [KeyFile(alice="tokens_per_s = 0.001\nburst_tokens = 60")])
async def test_a_caller_in_debt_can_end_its_sessions_but_not_resume_them(
    world: World, alice: Gateway
) -> None:
    stream, _ = await world.held(alice, 1, "x" * 80, speculation=Speculation(off=True))
    error = await refused(receive(alice.client.resume(stream.session_id, 1)))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "no token budget left" in error.message
    await alice.client.abort(stream.session_id)


@pytest.mark.parametrize(
    ("index", "seen_hash", "code"),
    [
        (1, b"x" * HASH_BYTES, grpc.StatusCode.DATA_LOSS),
        (101, b"", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
@pytest.mark.parametrize("key_file", [KeyFile(alice="tokens_per_s = 0.001\nburst_tokens = 2200")])
async def test_a_resume_that_its_session_refuses_costs_the_tokens_that_were_read(
    alice: Gateway, index: int, seen_hash: bytes, code: grpc.StatusCode
) -> None:
    stream = alice.generate(max_tokens=100)
    must_be_true(await receive(stream), 100)
    await alice.idle()
    for _ in range(20):
        error = await refused(receive(alice.client.resume(stream.session_id, index, seen_hash=seen_hash)))
        assert error.code is code
    await alice.idle()
    left = 2200 - len(PROMPT_TOKENS) - 100 - 20 * 100
    error = await refused(receive(alice.generate(max_tokens=left + 1)))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    must_be_true(await receive(alice.generate(max_tokens=left)), left)


@pytest.mark.parametrize("key_file", [KeyFile(alice="tokens_per_s = 0.001\nburst_tokens = 3300")])
async def test_a_prompt_costs_its_tokens_though_its_client_leaves_meanwhile(
    alice: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def parse_later(*given: Any) -> SessionSpec:
        began.set()
        go_on.wait(PATIENCE_S)
        return parse_generate(*given)

    monkeypatch.setattr("services.gateway.generation.parse_generate", parse_later)
    stream = alice.generate("x" * 2000)
    asking = asyncio.create_task(receive(stream))
    await asyncio.to_thread(began.wait, PATIENCE_S)
    asking.cancel()
    stream.cancel()
    await alice.idle()
    go_on.set()
    await receive(alice.generate("x" * 1100, max_tokens=1))  # its turn comes after that of the first
    await alice.idle()
    left = 3300 - 2000 - 1101
    error = await refused(receive(alice.generate("x", max_tokens=left + 1)))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len((await receive(alice.generate("x", max_tokens=left))).tokens) == left


@pytest.mark.parametrize("key_file", [KeyFile(alice="tokens_per_s = 0.001\nburst_tokens = 100")])
async def test_gateways_of_a_pool_share_the_budget(world: World, key_file: KeyFile, alice: Gateway) -> None:
    async with calling(await limiting(world, key_file), ALICE) as second:
        for caller in (alice, second) * 5:
            assert len((await receive(caller.generate("x", max_tokens=4))).tokens) == 4
        await alice.running.stop()  # it returns what it has leased
        left = 100 - 10 * (4 + 1)
        error = await refused(receive(second.generate("x", max_tokens=left + 1)))
        assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len((await receive(second.generate("x", max_tokens=left))).tokens) == left
        assert (await refused(receive(second.generate("x", max_tokens=1)))).retry_after_s


async def test_a_waiting_caller_gets_the_next_place(world: World, alice: Gateway, bob: Gateway) -> None:
    world.target.gate.close()
    async with AsyncExitStack() as held:
        streams = [alice.generate() for _ in range(4)]
        for stream in streams:
            held.callback(stream.cancel)
            await anext(stream)
        assert "4 streams of this gateway" in (await refused(receive(bob.generate()))).message
        streams[0].cancel()
        waiting = Received()
        while "its share is 2" not in (error := await refused(receive(alice.generate()))).message:
            assert "4 streams of this gateway" in error.message, "it has noticed nothing yet"
        assert error.retry_after_s
        theirs = bob.generate()
        world.target.gate.open()
        must_be_true(await waiting.listen(theirs))

"""A gateway over several target replicas: who is asked, and that it never shows in the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from galley.common.metrics.catalogue import REPLICAS
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.server.server import Parts
from galley.core.errors import TargetUnavailable, TokenizerMismatch
from galley.pb.galley.v1 import galley_pb2 as pb
from services.gateway.replicas.membership import POLL_S
from tests.fakes.fleet import Fleet
from tests.fakes.readings import number
from tests.fakes.redis_servers import Server
from tests.fakes.replicas import FakeTarget
from tests.fakes.world import PROMPT_TOKENS, Gateway, Received, World, must_be_true, receive, refused

STREAMS = 4


@pytest.fixture
async def fleet(world: World) -> AsyncIterator[Fleet]:
    async with Fleet(world) as fleet:
        await fleet.register()
        yield fleet


async def gateway_of(world: World, fleet: Fleet, **given: object) -> Gateway:
    gateway = await world.gateway(**{"target": "", **given})
    assert world.target.calls == []
    return gateway


@pytest.mark.parametrize("home", [0, 1])
async def test_a_session_goes_where_its_prompt_is_cached(world: World, fleet: Fleet, home: int) -> None:
    here, other = fleet.members[home], fleet.members[1 - home]
    await here.publish(cached=PROMPT_TOKENS)
    await other.publish(free=90)
    gateway = await gateway_of(world, fleet)
    must_be_true(await receive(gateway.generate()))
    assert here.fake.calls
    assert not other.fake.calls


async def test_concurrent_sessions_are_spread(world: World, fleet: Fleet) -> None:
    gateway = await gateway_of(world, fleet)
    fleet.hold_after(0)
    streams = [gateway.generate() for _ in range(STREAMS)]
    listening = [asyncio.ensure_future(receive(stream)) for stream in streams]
    for target in fleet.members:
        await target.fake.called(STREAMS // 2)
        target.fake.gate.open()
    for received in await asyncio.gather(*listening):
        must_be_true(received)
    first, second = (target.sessions for target in fleet.members)
    assert (len(first), len(second)) == (STREAMS // 2, STREAMS // 2)
    assert not first & second, "a session has one replica"


async def test_another_build_serves_if_no_other_is_up(world: World, fleet: Fleet) -> None:
    gateway = await gateway_of(world, fleet)
    fleet.hold_after(1)
    stream = gateway.generate()
    received = await receive(stream, until=1)
    doomed, other = fleet.holder()
    other.fake.fingerprint = "build-2"
    await other.publish()
    await doomed.fake.stop()
    other.fake.gate.open()
    must_be_true(await received.listen(stream))
    assert [fingerprint for _, fingerprint in received.changes] == ["build-2"]


async def test_a_drain_moves_only_new_sessions(world: World, fleet: Fleet) -> None:
    gateway = await gateway_of(world, fleet)
    fleet.hold_after(1)
    live = gateway.generate()
    received = await receive(live, until=1)
    draining, other = fleet.holder()
    await draining.drain()
    second = await gateway_of(world, fleet)
    other.fake.gate.open()
    must_be_true(await receive(second.generate()))
    draining.fake.gate.open()
    must_be_true(await received.listen(live))
    assert len(draining.sessions) == 1
    assert not draining.sessions & other.sessions


async def test_a_resumed_session_goes_where_its_kv_is(world: World, fleet: Fleet) -> None:
    first = await gateway_of(world, fleet)
    fleet.hold_after(2)
    stream = first.generate()
    received = await receive(stream, until=2)
    home, other = fleet.holder()
    stream.cancel()
    await first.idle()
    await other.publish(free=99)
    home.fake.gate.open()
    second = await gateway_of(world, fleet)
    must_be_true(await received.listen(second.client.resume_stream(stream)))
    assert not other.fake.calls


async def test_a_hanging_replica_loses_its_sessions(
    world: World, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.replicas.membership.LEASE_GRACE_S", 0.1)
    gateway = await gateway_of(world, fleet)
    fleet.hold_after(1)
    stream = gateway.generate()
    received = await receive(stream, until=1)
    hung, other = fleet.holder()
    other.fake.gate.open()
    await hung.withdraw()
    must_be_true(await received.listen(stream))
    assert other.sessions == hung.sessions


async def test_a_replica_of_another_tokenizer_is_refused_alone(world: World) -> None:
    async with Fleet(world) as fleet:
        wrong, right = fleet.members
        wrong.fake.tokenizer_hash, wrong.free = "another", 90
        await fleet.register()
        gateway = await gateway_of(world, fleet)
        must_be_true(await receive(gateway.generate()))
        assert right.fake.calls
        assert not wrong.fake.calls


async def test_a_refused_replica_is_counted_as_down(world: World) -> None:
    async with Fleet(world) as fleet:
        fleet.members[0].fake.tokenizer_hash = "another"
        await fleet.register()
        registry = Registry(GATEWAY)
        await world.gateway_of(Parts(metrics=registry), target="")
        assert number(registry, REPLICAS, "target", "up") == 1
        assert number(registry, REPLICAS, "target", "down") == 1


@pytest.mark.parametrize("reported", [True, False], ids=["told", "registered"])
async def test_a_gateway_refuses_replicas_of_another_tokenizer(world: World, reported: bool) -> None:
    async with Fleet(world) as fleet:
        for target in fleet.members:
            target.fake.tokenizer_hash = "another"
        if not reported:
            await fleet.register()
        with pytest.raises(TokenizerMismatch, match=f"another.*{world.tokenizer_hash}"):
            await world.gateway(target=fleet.addresses if reported else "")


async def test_deployments_that_share_a_redis_use_their_own_targets(world: World) -> None:
    async with Fleet(world) as fleet:
        for target, name in zip(fleet.members, ("blue", "green"), strict=True):
            target.pool_name = name
        await fleet.register()
        for target in fleet.members:
            gateway = await gateway_of(world, fleet, pool=target.pool_name)
            for _ in range(2):
                must_be_true(await receive(gateway.generate()))
        first, second = (target.sessions for target in fleet.members)
        assert (len(first), len(second)) == (2, 2)


async def test_deployments_that_share_a_redis_have_their_own_sessions(world: World) -> None:
    here, other = await world.gateway(pool="here"), await world.gateway(pool="other")
    key = f"key-{world.id}"
    stream, received = await world.held(here, 2, idempotency_key=key)
    for call in (receive(other.client.resume(stream.session_id, 0)), other.client.abort(stream.session_id)):
        assert (await refused(call)).code is grpc.StatusCode.NOT_FOUND
    world.target.gate.open()
    await receive(other.generate("Another body.", idempotency_key=key))
    must_be_true(await received.listen(stream))


async def test_listed_addresses_need_no_registry(world: World) -> None:
    async with Fleet(world) as fleet:
        gateway = await world.gateway(target=fleet.addresses)
        stream = gateway.generate()
        received = await receive(stream, until=1)
        doomed, _ = fleet.holder()
        await doomed.fake.stop()
        must_be_true(await received.listen(stream))
        must_be_true(await receive(gateway.generate()))


async def test_without_a_replica_a_gateway_does_not_start(world: World) -> None:
    with pytest.raises(TargetUnavailable, match="no target in the registry"):
        await world.gateway(target="", startup_timeout_s=0.3)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED])
async def test_a_replica_that_refuses_all_calls_ends_no_session(
    world: World, fleet: Fleet, code: grpc.StatusCode
) -> None:
    """As one does whose address another pod has taken, or a proxy before it whose policy is loaded anew."""
    gateway = await gateway_of(world, fleet)
    fleet.hold_after(2)
    stream = gateway.generate()
    received = await receive(stream, until=2)
    refusing, other = fleet.holder()
    refusing.fake.fail(code, 100)
    other.fake.gate.open()
    refusing.fake.gate.open()
    must_be_true(await received.listen(stream))


async def test_a_stream_resumes_at_the_next_replica(world: World) -> None:
    async with Fleet(world) as fleet:
        first, second = fleet.members
        await first.register()
        gateway = await gateway_of(world, fleet, target_timeout_s=2 * POLL_S)
        await first.leave()
        stream = gateway.generate()
        received = Received()
        error = await refused(received.listen(stream))
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert "target" in error.message
        await second.register()
        must_be_true(await received.listen(gateway.client.resume_stream(stream)))


async def test_model_info_holds_for_every_replica(world: World) -> None:
    async with Fleet(world, "abc", make=Lesser) as fleet:
        await fleet.register()
        gateway = await gateway_of(world, fleet)
        response = await gateway.client.model_info()
        assert not response.deterministic
        assert response.max_draft_tokens == response.context_window // 8 == 8
        assert response.fingerprint == "build-1", "that of most"


class Lesser(FakeTarget):
    async def GetTargetInfo(self, request: pb.GetTargetInfoRequest, context: Any) -> pb.GetTargetInfoResponse:
        info = await super().GetTargetInfo(request, context)
        if self.address.endswith("a/target"):
            info.deterministic, info.fingerprint = False, "build-0"
            info.context_window, info.max_draft_tokens = 64, 8
        return info


async def test_replicas_stay_known_while_the_registry_is_away(frail_world: World, own_store: Server) -> None:
    async with Fleet(frail_world) as fleet:
        await fleet.register()
        gateway = await gateway_of(frail_world, fleet)
        fleet.hold_after(1)
        stream = gateway.generate()
        received = await receive(stream, until=1)
        home, other = fleet.holder()
        own_store.kill()
        own_store.start()
        home.fake.gate.open()
        must_be_true(await received.listen(stream))
        assert not other.fake.calls

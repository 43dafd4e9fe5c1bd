"""A pool of several builds: a session prefers the build that computed it, and says when it gets another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from galley.common.metrics import catalogue
from galley.engine.model import CausalModel
from tests.fakes.fleet import Fleet, FleetTarget
from tests.fakes.redis_servers import Server
from tests.fakes.tiny_model import greedy
from tests.fakes.world import World, any_credit, must_be_true, receive
from tests.integration.services.gateway.real import Real, paged
from tests.integration.services.gateway.test_metrics import Counted, counted
from tests.integration.services.target.conftest import Servable, StubVllm

STREAMS = 6
PAGED, OTHER = "paged-build", "vllm-build"


@pytest.fixture
async def fleet(world: World) -> AsyncIterator[Fleet]:
    """Yield two registered targets of one build, and one of another engine, with blocks of another size."""
    async with Fleet(world, "abc") as fleet:
        for target, build in zip(fleet.members, (PAGED, PAGED, OTHER), strict=True):
            target.fake.fingerprint = build
        fleet.members[2].block = 16
        await fleet.register()
        yield fleet


def serving(fleet: Fleet) -> FleetTarget:
    [target] = [target for target in fleet.members if target.fake.calls]
    return target


async def prefer(fleet: Fleet, build: str, *gateways: Counted) -> None:
    """Report free blocks so that new sessions go to this build first; return when the gateways know."""
    for target in fleet.members:
        await target.publish(free=90 if target.fake.fingerprint == build else 10)
    used = 1 - sum(target.free for target in fleet.members) / (100 * len(fleet.members))
    for it in gateways:
        while it.number(catalogue.TARGETS_KV_USAGE) != pytest.approx(used):
            await it.gateway.client.model_info()


async def test_new_sessions_go_to_every_build(world: World, fleet: Fleet) -> None:
    gateway = await world.gateway(target="")
    fleet.hold_after(0)
    streams = [gateway.generate() for _ in range(STREAMS)]
    listening = [asyncio.ensure_future(receive(stream)) for stream in streams]
    for target in fleet.members:
        await target.fake.called(STREAMS // len(fleet.members))
        target.fake.gate.open()
    received = await asyncio.gather(*listening)
    for one in received:
        must_be_true(one)
        assert one.changes == []
    assert sorted(one.end.fingerprint for one in received) == sorted((PAGED, PAGED, OTHER) * 2)


@any_credit
async def test_a_session_moves_within_its_build_first(world: World, fleet: Fleet) -> None:
    it = await counted(world, target="")
    await prefer(fleet, PAGED, it)
    fleet.hold_after(1)
    stream = it.gateway.generate()
    received = await receive(stream, until=1)
    doomed = serving(fleet)
    assert doomed.fake.fingerprint == PAGED
    await prefer(fleet, OTHER, it)
    await doomed.fake.stop()
    for target in fleet.members:
        target.fake.gate.open()
    must_be_true(await received.listen(stream))
    assert received.changes == []
    assert not fleet.members[2].fake.calls


@any_credit
async def test_a_session_tells_of_the_build_that_it_gets_and_stays_there(world: World, fleet: Fleet) -> None:
    it = await counted(world, target="", draft="none")
    await prefer(fleet, OTHER, it)
    fleet.hold_after(1)
    stream = it.gateway.generate()
    received = await receive(stream, until=1)
    *paged, other = fleet.members
    assert serving(fleet) is other
    for target in paged:
        target.fake.gate.close_after(2)
    await other.fake.stop()
    await received.listen(stream, until=3)
    assert received.changes == [(1, PAGED)]
    await other.fake.start()  # its first build is there again
    await prefer(fleet, OTHER, it)
    [home] = [target for target in paged if target.fake.calls]
    await home.fake.stop()
    for target in fleet.members:
        target.fake.gate.open()
    must_be_true(await received.listen(stream))
    assert received.changes == [(1, PAGED)]
    assert received.end.fingerprint == PAGED


@pytest.mark.parametrize("lost", [False, True], ids=["its build lives", "its build is lost"])
async def test_a_resumed_session_prefers_its_build_too(world: World, fleet: Fleet, lost: bool) -> None:
    first, second = [await counted(world, target="", draft="none") for _ in range(2)]
    await prefer(fleet, PAGED, first)
    fleet.hold_after(2)
    stream = first.gateway.generate()
    received = await receive(stream, until=2)
    stream.cancel()
    await first.gateway.idle()
    *paged, other = fleet.members
    await prefer(fleet, OTHER, second)
    for target in paged if lost else [serving(fleet)]:
        await target.leave()
    for target in fleet.members:
        target.fake.calls.clear()
        target.fake.gate.open()
    must_be_true(await received.listen(second.gateway.client.resume_stream(stream)))
    assert received.changes == ([(2, OTHER)] if lost else [])
    assert bool(other.fake.calls) == lost


def vllm(model: CausalModel) -> Servable:
    return StubVllm(model, OTHER)


async def test_a_session_goes_on_at_an_engine_of_another_kind(
    tmp_path: Path, tiny: Path, shared_store: Server
) -> None:
    """The two engines draw alike here, so that the answer shows that no token is lost or repeated."""
    prompt, count = [5, 9, 2, 33], 100
    async with Real(tmp_path, tiny, shared_store.url, engines=[paged, vllm]) as it:
        for target in it.targets:
            target.engine.pass_s = 0.005
        stream = it.generate(prompt, max_tokens=count)
        received = await receive(stream, until=10)
        doomed, other = sorted(it.targets, key=lambda target: not target.engine.passes)
        doomed.engine.gate.clear()
        await doomed.die()
        await received.listen(stream)
        assert received.tokens == greedy(tiny, prompt, count)
        [(index, fingerprint)] = received.changes
        assert 10 <= index < count
        assert fingerprint == other.engine.info.fingerprint == received.end.fingerprint
        assert {target.engine.info.fingerprint for target in it.targets} == {"f00d", OTHER}

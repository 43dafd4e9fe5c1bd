"""Which targets a gateway accepts by their model and weights, and that an update to new weights goes on."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from galley.core.errors import TargetUnavailable
from tests.fakes.fleet import Fleet, FleetTarget
from tests.fakes.world import World, must_be_true, receive, refused

STREAMS = 2
OLD, NEW = "0" * 32, "1" * 32


def with_weights(*targets: FleetTarget) -> None:
    for target, digest in zip(targets, (OLD, NEW), strict=False):
        target.fake.weights_digest, target.fake.fingerprint = digest, f"build-{digest[0]}"


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "listed"])
async def test_a_target_of_another_model_is_not_used(world: World, registered: bool) -> None:
    async with Fleet(world) as fleet:
        stranger, _ = fleet.members
        stranger.fake.model, stranger.free = "other", 99
        if registered:
            await fleet.register()
        gateway = await world.gateway(target="" if registered else fleet.addresses)
        for _ in range(3):
            must_be_true(await receive(gateway.generate()))
        assert not stranger.fake.calls
        assert (await gateway.client.model_info()).model == "tiny"


async def test_a_gateway_waits_for_a_target_of_its_model(world: World) -> None:
    world.target.model = "other"
    with pytest.raises(
        TargetUnavailable, match=r"model: must be tiny \(--target-models\), got other@unknown"
    ):
        await world.gateway(startup_timeout_s=0.3)


async def test_the_model_of_targets_is_that_of_the_gateway(world: World) -> None:
    world.target.model = world.tokenizer.name
    gateway = await world.gateway(target_models="")
    must_be_true(await receive(gateway.generate()))
    assert (await gateway.client.model_info()).model == world.tokenizer.name


async def test_another_model_at_the_address_of_a_target_gets_no_request(world: World) -> None:
    gateway = await world.gateway(target_timeout_s=0.5)
    must_be_true(await receive(gateway.generate()))
    await world.target.stop()
    world.target.model = "other"
    await world.target.start()
    calls = len(world.target.calls)
    error = await refused(receive(gateway.generate()))
    assert "target" in error.message
    assert len(world.target.calls) == calls


async def test_new_weights_of_the_model_are_another_build(world: World) -> None:
    with capture_logs() as lines:
        await a_stream_goes_on_at_new_weights(world)
    [warned] = [line for line in lines if line["event"] == "targets differ in weights"]
    assert warned["weights_digests"] == [OLD, NEW]


async def a_stream_goes_on_at_new_weights(world: World) -> None:
    async with Fleet(world) as fleet:
        with_weights(*fleet.members)
        await fleet.register()
        gateway = await world.gateway(target="")
        fleet.hold_after(1)
        stream = gateway.generate()
        received = await receive(stream, until=1)
        doomed, other = fleet.holder()
        other.fake.gate.open()
        await doomed.fake.stop()
        must_be_true(await received.listen(stream))
        assert [build for _, build in received.changes] == [other.fake.fingerprint]


@pytest.mark.parametrize(
    ("models", "used"),
    [
        (f"tiny@{NEW}", [False, True]),
        (f"tiny@{OLD}, tiny@{NEW}", [True, True]),
        (f"other, tiny@{OLD}", [True, False]),
        (f"tiny@{OLD}, tiny", [True, True]),
    ],
)
async def test_weights_are_checked_if_named(world: World, models: str, used: list[bool]) -> None:
    async with Fleet(world) as fleet:
        with_weights(*fleet.members)
        await fleet.register()
        fleet.hold_after(0)
        gateway = await world.gateway(target="", target_models=models)
        listening = [asyncio.ensure_future(receive(gateway.generate())) for _ in range(STREAMS)]
        for target, is_used in zip(fleet.members, used, strict=True):
            await target.fake.called(STREAMS // sum(used) if is_used else 0)
            target.fake.gate.open()
        for received in await asyncio.gather(*listening):
            must_be_true(received)
        assert [bool(target.fake.calls) for target in fleet.members] == used


async def test_unknown_weights_are_none_of_those_named(world: World) -> None:
    with pytest.raises(TargetUnavailable, match=f"model: must be tiny@{OLD} .*, got tiny@unknown"):
        await world.gateway(target_models=f"tiny@{OLD}", startup_timeout_s=0.3)

"""Sessions of LoRA adapters: who serves them, and that failover and resume keep the adapter."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from galley.core.content import cache_salt
from tests.fakes.fleet import SALT, Fleet, FleetTarget
from tests.fakes.world import PROMPT_TOKENS, World, any_credit, must_be_true, receive, refused

ADAPTER = "sql"


@pytest.fixture
async def fleet(world: World) -> AsyncIterator[Fleet]:
    """Yield three registered targets, of which the last two offer the adapter."""
    async with Fleet(world, "abc") as fleet:
        fleet.members[0].free = 99  # it would be chosen
        for target in fleet.members[1:]:
            target.fake.lora_adapters = (ADAPTER, "fr")
        await fleet.register()
        yield fleet


def adapters_at(target: FleetTarget) -> set[str]:
    return {call.lora for call in target.fake.calls}


@pytest.mark.parametrize("named", [{"lora": ADAPTER}, {"model": ADAPTER}, {"model": f"tiny:{ADAPTER}"}])
async def test_an_adapter_is_served_where_it_is_offered(
    world: World, fleet: Fleet, named: dict[str, str]
) -> None:
    gateway = await world.gateway(target="")
    received = await receive(gateway.generate(**named))
    must_be_true(received)
    assert received.started is not None
    assert received.started.model == ADAPTER
    plain, *offering = fleet.members
    assert not plain.fake.calls
    assert set.union(*map(adapters_at, offering)) == {ADAPTER}
    assert sum(received.from_draft) > 0, "drafts propose for the model"
    base = await receive(gateway.generate())
    must_be_true(base)
    assert base.started is not None
    assert base.started.model == "tiny"
    assert adapters_at(plain) == {""}


@any_credit
async def test_a_failover_keeps_the_adapter(world: World, fleet: Fleet) -> None:
    gateway = await world.gateway(target="")
    fleet.hold_after(1)
    stream = gateway.generate(lora=ADAPTER)
    received = await receive(stream, until=1)
    plain, *offering = fleet.members
    doomed, other = offering if offering[0].fake.calls else offering[::-1]
    other.fake.gate.open()
    await doomed.fake.stop()
    must_be_true(await received.listen(stream))
    assert adapters_at(other) == {ADAPTER}
    assert not plain.fake.calls
    assert received.changes == []


async def test_a_resumed_session_keeps_its_adapter(world: World, fleet: Fleet) -> None:
    first, second = await world.gateway(target=""), await world.gateway(target="")
    fleet.hold_after(1)
    stream = first.generate(lora=ADAPTER)
    received = await receive(stream, until=1)
    assert received.started is not None
    stream.cancel()
    for target in fleet.members:
        target.fake.calls.clear()
        target.fake.gate.open()
    resumed = await receive(second.client.resume(received.started.session_id))
    must_be_true(resumed)
    assert resumed.started is not None
    assert resumed.started.model == ADAPTER
    assert set.union(*map(adapters_at, fleet.members)) == {ADAPTER}


async def test_a_session_goes_where_its_prompt_is_cached_with_its_adapter(world: World, fleet: Fleet) -> None:
    _, without, cached = fleet.members
    await without.publish(cached=PROMPT_TOKENS, free=90)
    await cached.publish(cached=PROMPT_TOKENS, salt=cache_salt(SALT, ADAPTER))
    gateway = await world.gateway(target="")
    must_be_true(await receive(gateway.generate(lora=ADAPTER)))
    assert adapters_at(cached) == {ADAPTER}
    assert not without.fake.calls


async def test_adapters_are_those_of_all_targets(world: World, fleet: Fleet) -> None:
    fleet.members[0].fake.lora_adapters = ("de",)
    await fleet.members[0].publish()
    gateway = await world.gateway(target="")
    info = await gateway.client.model_info(model="tiny:de")
    assert (info.model, list(info.lora_adapters)) == ("tiny", ["de", "fr", ADAPTER])


async def test_an_adapter_that_no_target_offers_is_refused_before_any_work(
    world: World, fleet: Fleet
) -> None:
    gateway = await world.gateway(target="")
    error = await refused(receive(gateway.generate(lora="it")))
    assert error.message == "lora: must be empty or one of fr, sql, got 'it'"
    error = await refused(receive(gateway.generate(model="it")))
    assert error.message == "model: must be 'tiny', a LoRA adapter of it or empty, got 'it'"
    for target in fleet.members:
        target.fake.lora_adapters = ()
    alone = await world.gateway()
    error = await refused(receive(alone.generate(lora="it")))
    assert error.message == "lora: must be empty: no LoRA adapter is offered, got 'it'"
    assert not any(target.fake.calls for target in fleet.members)
    assert not world.target.calls

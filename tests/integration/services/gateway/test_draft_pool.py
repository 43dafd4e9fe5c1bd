"""Gateways over several drafts: who drafts never shows in the tokens, and no stream ends for a draft."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from galley.client.options import Speculation
from galley.core.errors import TokenizerMismatch
from tests.fakes.fleet import DraftFleet, FleetDraft
from tests.fakes.waiting import PATIENCE_S
from tests.fakes.world import Gateway, World, any_credit, must_be_true, receive

FIXED = Speculation(k=4)
_ENOUGH = 300


@pytest.fixture
async def fleet(world: World) -> AsyncIterator[DraftFleet]:
    async with DraftFleet(world) as fleet:
        await fleet.register()
        yield fleet


async def test_a_gateway_finds_its_drafts_in_the_registry(world: World, fleet: DraftFleet) -> None:
    gateway = await world.gateway(draft="")
    for _ in range(2):
        received = await receive(gateway.generate(speculation=FIXED))
        must_be_true(received)
        assert any(received.from_draft)
    assert all(draft.fake.calls for draft in fleet.members)
    assert not world.draft.calls


async def test_drafts_of_several_models_serve_one_gateway(world: World) -> None:
    """A session that names no strategy may go to any of them; a named one only to those that offer it."""
    async with DraftFleet(world) as fleet:
        small, lookup = (member.fake for member in fleet.members)
        small.model, small.strategies = "small", ("hybrid", "ngram")
        lookup.model, lookup.strategies = "", ("ngram",)
        await fleet.register()
        gateway = await world.gateway(draft="")
        hybrid = Speculation(k=4, strategy="hybrid")
        for _ in range(2):
            received = await receive(gateway.generate(speculation=hybrid))
            must_be_true(received)
            assert any(received.from_draft)
        assert small.calls
        assert not lookup.calls
        must_be_true(await receive(gateway.generate(speculation=FIXED)))
        assert lookup.calls, "it has the fewest sessions"
        await small.stop()
        must_be_true(await receive(gateway.generate(speculation=hybrid)))


async def test_a_gateway_uses_a_list_of_drafts(world: World) -> None:
    async with DraftFleet(world) as fleet:
        gateway = await world.gateway(draft=fleet.addresses)
        must_be_true(await receive(gateway.generate(speculation=FIXED)))
        home, other = fleet.holder()
        await home.fake.stop()
        received = await receive(gateway.generate(speculation=FIXED))
        must_be_true(received)
        assert any(received.from_draft)
        assert other.fake.calls


async def test_two_gateways_share_one_draft(world: World) -> None:
    async with DraftFleet(world, "a") as fleet:
        await fleet.register()
        gateways = [await world.gateway(draft="") for _ in range(2)]
        streams = [gateway.generate(speculation=FIXED) for gateway in gateways for _ in range(2)]
        for received in await asyncio.gather(*(receive(stream) for stream in streams)):
            must_be_true(received)
            assert any(received.from_draft)
        assert len(fleet.members[0].sessions) == 4


async def test_a_resumed_session_goes_where_its_tokens_are(world: World, fleet: DraftFleet) -> None:
    first = await world.gateway(draft="")
    stream, received = await world.held(first, 2, until=6, speculation=FIXED)
    home, other = fleet.holder()
    stream.cancel()
    await first.idle()
    await home.publish(busy=9)
    world.target.gate.open()
    second = await world.gateway(draft="")
    must_be_true(await received.listen(second.client.resume_stream(stream)))
    assert not other.fake.calls


async def test_a_gateway_without_drafts_decodes_plainly(world: World) -> None:
    for draft in ("none", ""):
        gateway = await world.gateway(draft=draft)
        received = await receive(gateway.generate(speculation=FIXED))
        must_be_true(received)
        assert not any(received.from_draft)


@any_credit
async def test_lookup_replaces_a_missing_draft(world: World) -> None:
    async with DraftFleet(world, "a") as fleet:
        gateway = await world.gateway(draft="", lookup_fallback=True)
        world.target.pass_s = 0.002
        [draft] = fleet.members
        for there in (False, True, False, True):
            if there:
                await draft.fake.start()
                await fleet.register()
                await drafted_for(gateway, draft)
            else:
                await draft.leave()
            call_count = len(draft.fake.calls)
            received = await receive(gateway.generate(max_tokens=_ENOUGH, speculation=FIXED))
            must_be_true(received, _ENOUGH)
            assert any(received.from_draft)
            assert (len(draft.fake.calls) > call_count) == there


async def drafted_for(gateway: Gateway, draft: FleetDraft) -> None:
    async with asyncio.timeout(PATIENCE_S):
        call_count = len(draft.fake.calls)
        while len(draft.fake.calls) == call_count:
            await receive(gateway.generate(speculation=FIXED))


async def test_a_gateway_refuses_drafts_of_another_tokenizer(world: World) -> None:
    async with DraftFleet(world) as fleet:
        for draft in fleet.members:
            draft.fake.tokenizer_hash = "another"
        with pytest.raises(TokenizerMismatch, match=f"{world.tokenizer_hash}.*another"):
            await world.gateway(draft=fleet.addresses)
        fleet.members[1].fake.tokenizer_hash = world.tokenizer_hash
        gateway = await world.gateway(draft=fleet.addresses)
        assert any((await receive(gateway.generate(speculation=FIXED))).from_draft)

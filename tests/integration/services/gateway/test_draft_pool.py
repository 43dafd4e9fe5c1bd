"""Gateways over several drafts: who drafts never shows in the tokens, and no stream ends for a draft."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable

import pytest

from galley.client.options import Speculation
from galley.common.registry.leases import DRAFT_POOL, ReplicaRegistry
from galley.core.errors import TokenizerMismatch
from galley.core.routing.choice import DraftLease
from tests.fakes.draft_fleet import DraftFleet, FleetDraft
from tests.fakes.processes import DraftProcess
from tests.fakes.truth import true_output
from tests.fakes.waiting import PATIENCE_S, Gate
from tests.fakes.world import PROMPT_TOKENS, Gateway, Heard, World, any_credit, hear, must_be_true

FIXED = Speculation(k=4)
LONG = 1000
_ENOUGH = 300
PASS_S = 0.1


@pytest.fixture
async def fleet(world: World) -> AsyncIterator[DraftFleet]:
    """Two drafts that are registered; the world's own is not."""
    async with DraftFleet(world) as fleet:
        await fleet.register()
        yield fleet


async def test_a_gateway_finds_its_drafts_in_the_registry(world: World, fleet: DraftFleet) -> None:
    gateway = await world.gateway(draft="")
    for _ in range(2):
        heard = await hear(gateway.ask(speculation=FIXED))
        must_be_true(heard)
        assert any(heard.from_draft)
    assert all(draft.fake.calls for draft in fleet.drafts)
    assert not world.draft.calls


async def test_a_gateway_is_told_several_drafts(world: World) -> None:
    async with DraftFleet(world) as fleet:
        gateway = await world.gateway(draft=fleet.addresses)
        must_be_true(await hear(gateway.ask(speculation=FIXED)))
        home, other = fleet.holder()
        await home.fake.stop()
        heard = await hear(gateway.ask(speculation=FIXED))
        must_be_true(heard)
        assert any(heard.from_draft)
        assert other.fake.calls


async def test_two_gateways_share_one_draft(world: World) -> None:
    async with DraftFleet(world, "a") as fleet:
        await fleet.register()
        gateways = [await world.gateway(draft="") for _ in range(2)]
        streams = [gateway.ask(speculation=FIXED) for gateway in gateways for _ in range(2)]
        for heard in await asyncio.gather(*(hear(stream) for stream in streams)):
            must_be_true(heard)
            assert any(heard.from_draft)
        assert len(fleet.drafts[0].sessions) == 4


async def test_a_resumed_session_goes_where_its_tokens_are(world: World, fleet: DraftFleet) -> None:
    first = await world.gateway(draft="")
    world.target.gate.close()
    world.target.gate.permit(2)
    stream = first.ask(speculation=FIXED)
    heard = await hear(stream, until=6)
    home, other = fleet.holder()
    stream.cancel()
    await first.idle()
    home.busy = 9  # where it would not go if nobody knew
    await fleet.until(lambda leases: any(lease.sessions == 9 for lease in leases))
    world.target.gate.open()
    second = await world.gateway(draft="")
    must_be_true(await heard.listen(second.client.resume_stream(stream)))
    assert not other.fake.calls


async def test_a_gateway_without_drafts_decodes_plainly(world: World) -> None:
    for draft in ("none", ""):
        gateway = await world.gateway(draft=draft)
        heard = await hear(gateway.ask(speculation=FIXED))
        must_be_true(heard)
        assert not any(heard.from_draft)


@any_credit
async def test_without_a_draft_what_followed_before_is_guessed_until_one_comes(world: World) -> None:
    """The pool comes, goes and comes back beneath one session each: only the origins of tokens differ."""
    async with DraftFleet(world, "a") as fleet:
        gateway = await world.gateway(draft="", lookup_fallback=True)
        world.target.pass_s = 0.002  # unasked, it would be through before anybody has guessed
        [draft] = fleet.drafts
        for there in (False, True, False, True):
            if there:
                await draft.fake.start()
                await fleet.register()
                await drafted_for(gateway, draft)
            else:
                await draft.withdraw()
                await draft.fake.stop()
            asked = len(draft.fake.calls)
            heard = await hear(gateway.ask(max_tokens=_ENOUGH, speculation=FIXED))
            must_be_true(heard, _ENOUGH)
            assert any(heard.from_draft)
            assert (len(draft.fake.calls) > asked) == there


async def drafted_for(gateway: Gateway, draft: FleetDraft) -> None:
    """Wait until the gateway asks it."""
    async with asyncio.timeout(PATIENCE_S):
        asked = len(draft.fake.calls)
        while len(draft.fake.calls) == asked:
            await hear(gateway.ask(speculation=FIXED))


async def test_told_drafts_that_are_all_of_another_tokenizer_end_the_start(world: World) -> None:
    async with DraftFleet(world) as fleet:
        for draft in fleet.drafts:
            draft.fake.tokenizer_hash = "another"
        with pytest.raises(TokenizerMismatch, match=f"another.*{world.tokenizer_hash}"):
            await world.gateway(draft=fleet.addresses)
        fleet.drafts[1].fake.tokenizer_hash = world.tokenizer_hash
        gateway = await world.gateway(draft=fleet.addresses)
        assert any((await hear(gateway.ask(speculation=FIXED))).from_draft)


@pytest.mark.parametrize("credit", [32])
async def test_drafts_are_killed_frozen_and_replaced_beneath_a_stream(world: World) -> None:
    """Real processes, of which always one drafts: what each lease says of its sessions tells which."""
    registry = ReplicaRegistry(world.redis_url)
    gateway = await world.gateway(draft="", draft_timeout_s=0.3)
    world.target.gate.close()
    passing = asyncio.ensure_future(slowly(world.target.gate))
    async with DraftProcess(world) as killed:
        stream = gateway.ask(max_tokens=LONG, speculation=FIXED)
        heard = Heard()
        listening = asyncio.ensure_future(heard.listen(stream))
        await until(registry, drafting(killed))
        async with DraftProcess(world) as frozen:
            killed.send(signal.SIGKILL)
            await until(registry, drafting(frozen))
            frozen.send(signal.SIGSTOP)
            async with DraftProcess(world) as drained:
                await until(registry, drafting(drained))
                frozen.send(signal.SIGCONT)
                await until(registry, lambda leases: frozen.address in {it.address for it in leases})
                drained.send(signal.SIGTERM)
                assert await drained.ended() == 0
                assert drained.address not in {it.address for it in await registry.read(DRAFT_POOL)}
            await until(registry, drafting(frozen))
            assert not listening.done()
            passing.cancel()
            world.target.gate.open()
            await listening
    assert heard.tokens == true_output(PROMPT_TOKENS, LONG)
    assert heard.finished is not None
    await registry.close()


async def slowly(gate: Gate) -> None:
    """The target's passes take their time, so that the stream lasts."""
    while True:
        gate.permit()
        await asyncio.sleep(PASS_S)


def drafting(draft: DraftProcess) -> Callable[[list[DraftLease]], bool]:
    """Whether sessions ask this one."""
    return lambda leases: any(it.address == draft.address and it.sessions for it in leases)


async def until(registry: ReplicaRegistry, holds: Callable[[list[DraftLease]], bool]) -> None:
    """Wait until the registry reads so."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds(await registry.read(DRAFT_POOL)):  # noqa: ASYNC110  # Redis does not call back
            await asyncio.sleep(0.02)

"""Targets of an earlier version, which ignore grammars: no session with a grammar may reach one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from galley.client.client import AsyncStream
from tests.fakes.fleet import Fleet, FleetTarget
from tests.fakes.world import Gateway, Received, World, any_credit, must_be_true, receive, refused

ANY_TEXT = r"(?s:.*)"
LACKING = "structured_output.regex: no target decodes by it; earlier versions do not"


@pytest.fixture
async def fleet(world: World) -> AsyncIterator[Fleet]:
    """Yield three registered targets, of which the first is of an earlier version."""
    async with Fleet(world, "abc") as fleet:
        fleet.members[0].fake.grammar_kinds = ()
        fleet.members[0].free = 99  # it would be chosen
        await fleet.register()
        yield fleet


def constrained(gateway: Gateway, **options: Any) -> AsyncStream:
    return gateway.generate(regex=ANY_TEXT, ignore_eos=False, **options)


async def held(gateway: Gateway, fleet: Fleet) -> tuple[AsyncStream, Received, FleetTarget, FleetTarget]:
    """Return a constrained session after its first token, its target, and the other that would take it."""
    fleet.hold_after(1)
    stream = constrained(gateway)
    received = await receive(stream, until=1)
    _, first, second = fleet.members
    return stream, received, *((first, second) if first.fake.calls else (second, first))


@pytest.mark.parametrize("speculation", ["auto", "off"])
async def test_a_grammar_is_followed_where_it_is_known(world: World, fleet: Fleet, speculation: str) -> None:
    gateway = await world.gateway(target="")
    earlier, *later = fleet.members
    received = await receive(constrained(gateway, speculation=speculation))
    assert received.finished is not None
    assert not earlier.fake.calls
    assert all(call.slice.grammar_hash for target in later for call in target.fake.calls)
    must_be_true(await receive(gateway.generate()))
    assert earlier.fake.calls, "it serves all other sessions"


@any_credit
async def test_a_failover_goes_to_a_target_that_knows_grammars(world: World, fleet: Fleet) -> None:
    gateway = await world.gateway(target="")
    stream, received, doomed, other = await held(gateway, fleet)
    other.fake.gate.open()
    await doomed.fake.stop()
    assert (await received.listen(stream)).finished is not None
    assert other.fake.calls
    assert not fleet.members[0].fake.calls


async def test_a_session_that_only_earlier_targets_are_left_for_can_be_resumed(
    world: World, fleet: Fleet
) -> None:
    first = await world.gateway(target="", target_timeout_s=2)
    second = await world.gateway(target="")
    stream, received, doomed, other = await held(first, fleet)
    for target in (other, doomed):
        await target.drain()
        await target.fake.stop()
    error = await refused(received.listen(stream))
    assert (error.code, LACKING in error.message) == (grpc.StatusCode.UNAVAILABLE, True)
    await doomed.withdraw()
    doomed.fake.gate.open()
    await doomed.fake.start()
    await doomed.register()
    assert (await received.listen(second.client.resume_stream(stream))).finished is not None
    assert not fleet.members[0].fake.calls


async def test_a_request_that_no_target_can_serve_is_refused_before_any_work(world: World) -> None:
    world.target.grammar_kinds = ("choice",)
    gateway = await world.gateway()
    error = await refused(receive(constrained(gateway)))
    assert (error.code, error.message) == (grpc.StatusCode.UNAVAILABLE, LACKING)
    assert not world.target.calls
    assert not world.draft.calls
    must_be_true(await receive(gateway.generate()))


@pytest.mark.parametrize("kinds", [(), ("choice",)])
async def test_an_earlier_version_at_the_same_address_gets_no_grammar(
    world: World, kinds: tuple[str, ...]
) -> None:
    gateway = await world.gateway(target_timeout_s=0.5)
    stream, received = await world.held(gateway, passes=1, regex=ANY_TEXT, ignore_eos=False)
    await world.target.stop()
    world.target.grammar_kinds, before = kinds, len(world.target.calls)
    world.target.gate.open()
    await world.target.start()
    error = await refused(received.listen(stream))
    assert error.code == grpc.StatusCode.UNAVAILABLE
    assert len(world.target.calls) == before
    error = await refused(receive(constrained(gateway)))
    assert error.message == LACKING

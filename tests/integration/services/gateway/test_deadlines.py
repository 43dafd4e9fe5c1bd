"""What is left of a call's deadline goes with whatever is asked for it."""

from __future__ import annotations

from tests.fakes.world import World, any_credit, hear, must_be_true

SECOND = 1_000_000_000
# gRPC writes a deadline in few digits and rounds it up: of 20 s, up to 20.1 s are seen behind a quick hop.
ROUNDED_UP = 1.005


@any_credit
async def test_every_item_is_told_what_is_left_of_the_calls_deadline(world: World) -> None:
    gateway = await world.gateway(draft_timeout_s=100)
    must_be_true(await hear(gateway.ask(timeout_s=20)))
    for calls in (world.draft.calls, world.target.calls):
        left = [call.slice.remaining_ns for call in calls]
        assert left
        assert all(0 < ns <= 20 * SECOND * ROUNDED_UP for ns in left)
        assert left == sorted(left, reverse=True)


async def test_without_a_deadline_items_have_the_gateways_own_bounds(world: World, credit: int) -> None:
    assert credit == 0
    gateway = await world.gateway(draft_timeout_s=10, verify_timeout_s=30)
    must_be_true(await hear(gateway.ask()))
    assert {call.slice.remaining_ns for call in world.target.calls} == {30 * SECOND}
    # Less, so that what is ready then comes in time.
    assert {call.slice.remaining_ns for call in world.draft.calls} == {8 * SECOND}

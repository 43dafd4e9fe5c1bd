"""Two gateways told to own one session at once: one log, no interleaving.

`make prove-ownership` does it a thousand times, with gateways in processes of their own.
"""

from __future__ import annotations

import pytest

from tests.fakes.world import World, any_credit
from tests.integration.services.gateway.ownership import Tally, arena

ROUNDS = 12


@any_credit
@pytest.mark.parametrize("under_way", [False, True], ids=["new", "under way"])
async def test_a_session_has_one_owner_at_a_time(world: World, under_way: bool) -> None:
    async with arena(world) as contestants:
        tally = Tally()
        for _ in range(ROUNDS):
            await contestants.contest(tally, under_way=under_way)
    assert not tally.faults
    assert tally.outcomes["finished"] >= ROUNDS
    assert tally.outcomes["fenced"] > ROUNDS / 4, "there was a contest"
    assert tally.handed_over > 0 or not under_way

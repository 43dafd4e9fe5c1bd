"""Fuzzed messages on every RPC of every port. `make prove-attacks` sends 200,000 and more."""

from __future__ import annotations

from pathlib import Path

from galley.trace.read.otlp_file import Lines, spans_in
from tests.attack.campaign import Campaign
from tests.attack.stack import MIB, Attacked, unharmed

SEED = 20261122
MESSAGES = 2500


async def test_fuzzed_messages_are_refused_without_crash_hang_or_leak(
    stack: Attacked,
) -> None:
    campaign = Campaign(stack.addresses, SEED)
    async with unharmed(stack):
        await campaign.run(MESSAGES // 5)
    warm = await stack.state()
    # Garbage of thousands of calls is collected in one turn of the event loop.
    async with unharmed(stack, most_held_s=1):
        outcome = await campaign.run(MESSAGES - MESSAGES // 5)
    assert not outcome.faults
    assert outcome.messages >= MESSAGES
    assert {end.split(":")[0] for end in outcome.ends} == {rpc.name for rpc in campaign.rpcs}
    assert (await stack.state()).rss - warm.rss < 32 * MIB
    assert spans_of(stack.traces) > 100


def spans_of(file: Path) -> int:
    return sum(len(list(spans_in(line.document()))) for line in Lines(file))

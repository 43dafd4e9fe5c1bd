"""Tokens that a grammar forces, from the request to its statistics: the gateway drafts them itself."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from typing import Any

import pytest

from galley.client.options import Speculation
from galley.core.names import GRAMMAR, NO_STRATEGY
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.structured import Answers
from tests.fakes.truth import SEED, true_next
from tests.fakes.world import PROMPT_TOKENS, Gateway, Received, World, any_credit, receive

SCHEMA = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "maxLength": 12},
        "express_delivery": {"type": "boolean"},
        "destination": {"enum": ["warehouse", "workshop"]},
    },
    "required": ["customer", "express_delivery", "destination"],
    "additionalProperties": False,
}
ALONE = Speculation(k=8, strategy=NO_STRATEGY)
DISAGREES_AT = 30


@pytest.fixture(autouse=True)
def answers(world: World) -> None:
    world.target.truth = Answers(world.tokenizer).of


async def answered(gateway: Gateway, **options: Any) -> Received:
    stream = gateway.generate(schema=SCHEMA, ignore_eos=False, max_tokens=200, **options)
    return await receive(stream)


def of_grammar(received: Received) -> pb.SourceStats:
    [source] = [one for one in received.end.speculation.sources if one.source == GRAMMAR]
    return source


@any_credit
async def test_forced_runs_are_drafted_without_a_draft(world: World, gateway: Gateway) -> None:
    world.target.pass_s = 0.02  # so that hints arrive in time
    plain = await answered(gateway, speculation="off")
    received = await answered(gateway, speculation=ALONE)
    assert received.tokens == plain.tokens
    assert json.loads(received.text).keys() == {"customer", "express_delivery", "destination"}
    forced = of_grammar(received)
    assert forced.accepted > len(received.tokens) // 3
    assert forced.accepted == forced.verified == sum(received.from_draft)
    assert received.end.speculation.rounds <= len(received.tokens) - forced.accepted
    assert world.draft.calls == []


async def test_forced_runs_go_on_after_a_resume(world: World) -> None:
    first, second = await world.gateway(), await world.gateway()
    whole = await answered(first, speculation=ALONE)
    options: dict[str, Any] = {"schema": SCHEMA, "ignore_eos": False, "max_tokens": 200, "speculation": ALONE}
    stream, received = await world.held(first, passes=4, until=1, **options)
    stream.cancel()
    world.target.gate.open()
    await received.listen(second.client.resume_stream(stream))
    assert received.tokens == whole.tokens
    assert of_grammar(received).accepted > 0


@pytest.mark.parametrize("speculation", [ALONE, "off"], ids=["drafting", "off"])
async def test_what_a_target_confirms_stands_whatever_the_gateways_own_grammar_says(
    world: World, speculation: Speculation | str
) -> None:
    """Another version of llguidance, or work that is counted otherwise, must not end a session here."""
    constrained = world.target.truth

    def other(part: pb.SessionSlice) -> Any:
        """Follow the grammar for some tokens, then write others."""
        followed = constrained(part)

        def next_token(tokens: Sequence[int], seed: int, banned: Set[int]) -> int:
            near_begin = len(tokens) - part.prompt_len < DISAGREES_AT
            return followed(tokens, seed, banned) if near_begin else true_next(tokens, seed, banned)

        return next_token

    world.target.truth = other
    gateway = await world.gateway()
    received = await answered(gateway, speculation=speculation)
    written: list[int] = []
    next_token = other(world.target.calls[0].slice)
    while len(written) < len(received.tokens):
        written.append(next_token([*PROMPT_TOKENS, *written], SEED, frozenset()))
    assert received.tokens == written
    assert received.end.reason in {pb.Finished.REASON_STOP, pb.Finished.REASON_LENGTH}
    assert len(written) > DISAGREES_AT
    if speculation == ALONE:
        assert of_grammar(received).accepted > 0, "it drafted until then"

"""Tokens that a grammar forces, from the request to its statistics: the gateway drafts them itself."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from galley.client.options import Speculation
from galley.core.names import GRAMMAR, NO_STRATEGY
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.structured import Answers
from tests.fakes.world import Gateway, Received, World, any_credit, receive, refused

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


async def test_a_target_that_ignores_the_grammar_does_not_reach_the_log(world: World) -> None:
    free = world.target.truth

    def ignoring(part: pb.SessionSlice) -> Any:
        bare = pb.SessionSlice()
        bare.CopyFrom(part)
        bare.ClearField("grammar_hash")
        bare.ClearField("structured_output")
        return free(bare)

    world.target.truth = ignoring
    gateway = await world.gateway()
    error = await refused(answered(gateway, speculation=ALONE))
    await gateway.idle()
    world.expect_error("session failed")
    assert error.code == grpc.StatusCode.INTERNAL

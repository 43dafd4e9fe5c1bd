"""Predicted outputs, from the request to its usage: the draft pool is not asked, and no token changes."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.server.server import Parts
from galley.core.names import PREDICTION
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.readings import number
from tests.fakes.truth import SEED, VOCAB, true_output
from tests.fakes.world import (
    MAX_TOKENS,
    PROMPT,
    PROMPT_TOKENS,
    Gateway,
    Received,
    World,
    any_credit,
    must_be_true,
)

TRUTH = true_output(PROMPT_TOKENS, MAX_TOKENS, SEED)
ANOTHER = [*TRUTH[:12], *b"?!", *TRUTH[13:]]
"""One token of the output is replaced by two others."""


def request(prediction: list[int], **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=PROMPT,
        max_tokens=MAX_TOKENS,
        sampling=pb.SamplingParams(seed=SEED),
        ignore_eos=True,
        prediction=pb.Prediction(token_ids=pb.TokenIds(ids=prediction)),
        **fields,
    )


async def received(
    gateway: Gateway,
    message: pb.GenerateRequest | pb.ResumeRequest,
    first_index: int = 0,
    until: int = MAX_TOKENS,
) -> Received:
    """Return the stream's end, or its first `until` tokens if that is fewer than all."""
    result = Received(first_index=first_index)
    async with grpc.aio.insecure_channel(gateway.address) as channel:
        stub: rpc.GenerationAsyncStub = rpc.GenerationStub(channel)
        call = stub.Generate(message) if isinstance(message, pb.GenerateRequest) else stub.Resume(message)
        async for response in call:
            result.receive(response.event)
            if until < MAX_TOKENS and len(result.tokens) >= until:
                call.cancel()
                break
    return result


@any_credit
@pytest.mark.parametrize(("prediction", "accepted"), [(TRUTH, MAX_TOKENS), (ANOTHER, MAX_TOKENS - 1)])
async def test_a_prediction_is_drafted_without_a_draft(
    world: World, prediction: list[int], accepted: int
) -> None:
    registry = Registry(GATEWAY)
    gateway = await world.gateway_of(Parts(metrics=registry))
    result = await received(gateway, request(prediction))
    must_be_true(result)
    usage, stats = result.end.usage, result.end.speculation
    assert accepted - 2 <= usage.accepted_prediction_tokens <= accepted
    assert usage.rejected_prediction_tokens == len(prediction) - usage.accepted_prediction_tokens
    assert stats.rounds <= MAX_TOKENS // 2
    [source] = [one for one in stats.sources if one.source == PREDICTION]
    assert source.accepted >= MAX_TOKENS // 2
    assert sum(one.accepted for one in stats.sources) == stats.accepted == sum(result.from_draft)
    await gateway.idle()
    assert number(registry, catalogue.ACCEPTED_TOKENS, "none", PREDICTION, "tiny") == source.accepted
    if prediction is TRUTH:
        assert world.draft.calls == []


async def test_the_counts_of_a_prediction_survive_a_resume(world: World) -> None:
    first, second = await world.gateway(), await world.gateway()
    whole = await received(first, request(ANOTHER))
    for cut in range(1, MAX_TOKENS, 9):
        begun = await received(first, request(ANOTHER), until=cut)
        assert begun.started is not None
        rest = pb.ResumeRequest(session_id=begun.started.session_id, next_index=len(begun.tokens))
        ended = await received(second, rest, first_index=len(begun.tokens))
        assert [*begun.tokens, *ended.tokens] == TRUTH
        assert ended.end.usage == whole.end.usage


async def test_without_speculation_a_prediction_is_only_counted(world: World) -> None:
    off = pb.Speculation(mode=pb.Speculation.MODE_OFF)
    result = await received(await world.gateway(), request(TRUTH, speculation=off))
    must_be_true(result)
    assert result.end.speculation.rounds == MAX_TOKENS
    assert result.end.usage.accepted_prediction_tokens == MAX_TOKENS


async def test_strategy_none_asks_no_draft(world: World) -> None:
    """The prediction is wrong from its first token on, so that a draft would be asked."""
    alone = pb.Speculation(mode=pb.Speculation.MODE_FIXED, k=4, strategy="none")
    result = await received(await world.gateway(), request([5, 6, 7], speculation=alone))
    must_be_true(result)
    assert world.draft.calls == []


async def test_a_prediction_outside_the_vocabulary_is_refused(world: World) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await received(await world.gateway(), request([VOCAB]))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "prediction.token_ids.ids[0]" in (caught.value.details() or "")

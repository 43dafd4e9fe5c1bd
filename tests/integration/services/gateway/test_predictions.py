"""Predicted outputs, from the request to its usage: the draft pool is not asked, and no token changes."""

from __future__ import annotations

import grpc
import pytest

from galley.client.options import Speculation
from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.common.server.server import Parts
from galley.core.names import PREDICTION
from tests.fakes.readings import number
from tests.fakes.truth import SEED, VOCAB, true_output
from tests.fakes.world import (
    MAX_TOKENS,
    PROMPT_TOKENS,
    World,
    any_credit,
    must_be_true,
    receive,
    refused,
)

TRUTH = true_output(PROMPT_TOKENS, MAX_TOKENS, SEED)
ANOTHER = [*TRUTH[:12], *b"?!", *TRUTH[13:]]
"""One token of the output is replaced by two others."""


@any_credit
@pytest.mark.parametrize(("prediction", "accepted"), [(TRUTH, MAX_TOKENS), (ANOTHER, MAX_TOKENS - 1)])
async def test_a_prediction_is_drafted_without_a_draft(
    world: World, prediction: list[int], accepted: int
) -> None:
    world.target.pass_s = 0.02  # so that hints arrive in time
    registry = Registry(GATEWAY)
    gateway = await world.gateway_of(Parts(metrics=registry))
    result = await receive(gateway.generate(prediction=prediction))
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
    whole = await receive(first.generate(prediction=ANOTHER))
    for cut in range(1, MAX_TOKENS, 9):
        stream = first.generate(prediction=ANOTHER)
        received = await receive(stream, until=cut)
        stream.cancel()
        await received.listen(second.client.resume_stream(stream))
        must_be_true(received)
        assert received.end.usage == whole.end.usage


async def test_without_speculation_a_prediction_is_only_counted(world: World) -> None:
    result = await receive((await world.gateway()).generate(prediction=TRUTH, speculation="off"))
    must_be_true(result)
    assert result.end.speculation.rounds == MAX_TOKENS
    assert result.end.usage.accepted_prediction_tokens == MAX_TOKENS


async def test_strategy_none_asks_no_draft(world: World) -> None:
    """The prediction is wrong from its first token on, so that a draft would be asked."""
    alone = Speculation(k=4, strategy="none")
    result = await receive((await world.gateway()).generate(prediction=[5, 6, 7], speculation=alone))
    must_be_true(result)
    assert world.draft.calls == []


async def test_a_prediction_outside_the_vocabulary_is_refused(world: World) -> None:
    gateway = await world.gateway()
    error = await refused(receive(gateway.generate(prediction=[VOCAB])))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "prediction.token_ids.ids[0]" in error.message
    assert world.target.calls == []

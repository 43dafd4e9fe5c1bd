"""States through the real service: what is refused, and to which tokens the states that come belong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from galley.core.features import MAX_FEATURE_TOKENS, States
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from tests.fakes.engine import KnownEngine
from tests.fakes.states import LAYERS, SIZE, states_of
from tests.fakes.truth import IDS, true_id, true_output
from tests.fakes.verify_items import slice_of, stream_of, verify
from tests.integration.services.target.conftest import Recording

PROMPT = [1 + i % 5 for i in range(9)]
WANTED = (2, 5, LAYERS)


@pytest.fixture
def info() -> dict[str, int]:
    return {}


@pytest.fixture
def engine(info: dict[str, int]) -> Recording:
    return Recording(KnownEngine(**info))


def wanting(tokens: Sequence[int] = PROMPT, *, start: int = 0, **given: Any) -> pb.VerifyItem:
    return pb.VerifyItem(
        slice=slice_of(tokens, start=start, prompt_len=len(PROMPT)),
        **{"want_features": True, "feature_layers": WANTED, **given},
    )


def states(result: pb.VerifyResult, layers: int = len(WANTED)) -> States:
    each = 2 * layers * SIZE
    assert len(result.features) % each == 0
    return States(result.features_position, len(result.features) // each, result.features)


BAD = [
    ("feature_layers", [], "must have 1 to 4 entries, got 0"),
    ("feature_layers", [1, 2, 3, 4, 5], "must have 1 to 4 entries, got 5"),
    ("feature_layers[0]", [0], f"must be in [1, {LAYERS}], got 0"),
    ("feature_layers[1]", [3, 3], f"must be in [4, {LAYERS}], got 3"),
    ("feature_layers[2]", [1, 4, 2], f"must be in [5, {LAYERS}], got 2"),
    ("feature_layers[1]", [1, LAYERS + 1], f"must be in [2, {LAYERS}], got {LAYERS + 1}"),
]


@pytest.mark.parametrize(("field", "layers", "problem"), BAD)
async def test_layers_that_the_target_does_not_have_are_refused_before_any_work(
    target: rpc.TargetAsyncStub, engine: Recording, field: str, layers: list[int], problem: str
) -> None:
    (refused,) = await verify(target, wanting(feature_layers=layers))
    assert refused.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert refused.status.message == f"{field}: {problem}"
    assert not engine.passes


@pytest.mark.parametrize("info", [{"feature_size": 0, "feature_layers": 0}])
async def test_a_target_without_states_refuses_those_who_want_some(target: rpc.TargetAsyncStub) -> None:
    about = await target.GetTargetInfo(pb.GetTargetInfoRequest())
    assert (about.feature_size, about.feature_layers) == (0, 0)
    refused, served = await verify(
        target, wanting(), pb.VerifyItem(slice=slice_of(PROMPT, session_id="plain"))
    )
    assert refused.status.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
    assert refused.status.message.startswith("want_features: ")
    assert served.result.tokens


async def test_a_target_says_which_states_it_has(target: rpc.TargetAsyncStub) -> None:
    about = await target.GetTargetInfo(pb.GetTargetInfoRequest())
    assert (about.feature_size, about.feature_layers) == (SIZE, LAYERS)


async def test_whoever_asks_for_no_states_gets_none(target: rpc.TargetAsyncStub, engine: Recording) -> None:
    (answer,) = await verify(target, wanting(want_features=False))
    assert (answer.result.features, answer.result.features_position) == (b"", 0)
    assert [chunk.feature_layers for plan in engine.passes for chunk in plan.chunks] == [()]


@pytest.mark.parametrize("credit", [0, 4])
async def test_the_states_of_a_stream_follow_each_other(target: rpc.TargetAsyncStub, credit: int) -> None:
    tokens, end = list(PROMPT), 0
    async with stream_of(target) as stream:
        while len(tokens) < len(PROMPT) + 20:
            drafts = true_output(tokens, 3, next_token=true_id)
            drafts[2] = (drafts[2] + len(tokens) % 2) % IDS
            await stream.send(wanting(tokens, start=end, draft_tokens=drafts, credit=credit))
            for answer in await stream.until_last():
                tokens += answer.result.tokens
                came = states(answer.result)
                assert came.position == end
                end = len(tokens) - 1
                assert came == states_of(tokens, came.position, end, WANTED)


async def test_of_a_long_prompt_the_last_states_come(target: rpc.TargetAsyncStub) -> None:
    prompt = [1 + i % 5 for i in range(120)]
    (answer,) = await verify(target, wanting(prompt))
    assert states(answer.result) == states_of(prompt, 120 - MAX_FEATURE_TOKENS, 120, WANTED)

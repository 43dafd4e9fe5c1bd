"""Requests with the target's states, to a real service whose draft reads them."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
import torch

from galley.common.draft_loading import send_draft
from galley.core.errors import UnsupportedModel
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.draft.loading import load_strategies
from services.draft.settings import DraftSettings
from tests.fakes.feature_drafts import save_feature_draft
from tests.fakes.verify_items import slice_of
from tests.integration.galley.engine.drafts import draft_of, save_target
from tests.integration.services.draft.conftest import draft_server, drafting
from tests.integration.services.draft.test_propose import propose

PROMPT = [5, 9, 2, 33, 17, 60, 71, 12]
LAYERS = (1, 3)
SIZE = 64
TOKEN_BYTES = 2 * len(LAYERS) * SIZE


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = save_target(tmp_path_factory.mktemp("target"))
    directory = draft_of(target, own=True).save(tmp_path_factory.mktemp("plain") / "draft")
    (directory / "tokenizer.json").write_bytes((target / "tokenizer.json").read_bytes())
    return directory


@pytest.fixture(scope="module")
def reading(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_feature_draft(plain, tmp_path_factory.mktemp("reading") / "draft", LAYERS, size=1.0)
    (directory / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    return directory


def states(tokens: int) -> bytes:
    numbers = torch.randn(tokens, len(LAYERS), SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    return numbers.view(torch.int16).numpy().tobytes()


def item(
    strategy: str = "", *, features: bytes = b"", position: int = 0, ahead: int = 0, session_id: str = "a"
) -> pb.ProposeItem:
    return pb.ProposeItem(
        slice=slice_of(PROMPT, session_id=session_id),
        k=4,
        strategy=strategy,
        features=features,
        features_position=position,
        ahead=ahead,
    )


async def test_states_change_the_tokens_and_the_result_says_so(reading: Path) -> None:
    whole = states(len(PROMPT) - 1)
    async with drafting(model=str(reading), dtype="float32") as draft:
        info = await draft.GetDraftInfo(pb.GetDraftInfoRequest())
        without, known, again, late = [
            (await propose(draft, one))[0].result
            for one in (
                item(),
                item(features=whole, session_id="b"),
                item(session_id="b"),
                item("hybrid", features=whole[TOKEN_BYTES:], position=1),
            )
        ]
    assert list(info.strategies) == ["features", "hybrid", "ngram", "none"]
    assert info.default_strategy == "features"
    assert (list(info.feature_layers), info.feature_size) == (list(LAYERS), SIZE)
    assert not without.used_features
    assert known.used_features
    assert late.used_features
    assert known.draft_tokens != without.draft_tokens
    assert again.draft_tokens == known.draft_tokens
    assert again.used_features


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (item(features=states(2)[:-1]), f"must be {TOKEN_BYTES} bytes a token"),
        (item(features=b"x" * TOKEN_BYTES * 65), f"{TOKEN_BYTES} bytes a token, of at most 64 tokens"),
        (item(features=states(3), position=len(PROMPT) - 2), "must be of tokens before 8"),
        (item(features=states(3), position=2**32 - 1), "must be of tokens before 8"),
        (item(features=states(6), ahead=3), "must be of tokens before 5"),
    ],
    ids=["part of a number", "too many", "beyond the end", "far beyond", "of draft tokens"],
)
async def test_states_that_do_not_fit_are_refused_by_name(
    reading: Path, wrong: pb.ProposeItem, problem: str
) -> None:
    async with drafting(model=str(reading), dtype="float32") as draft:
        (refused,) = await propose(draft, wrong)
        (next_one,) = await propose(draft, item())
    assert refused.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert refused.status.message.startswith("features: ")
    assert problem in refused.status.message
    assert next_one.result.draft_tokens


async def test_a_plain_draft_takes_none(plain: Path) -> None:
    async with drafting(model=str(plain), dtype="float32") as draft:
        info = await draft.GetDraftInfo(pb.GetDraftInfoRequest())
        (refused,) = await propose(draft, item(features=states(1)))
    assert refused.status.code == grpc.StatusCode.UNIMPLEMENTED.value[0]
    assert (list(info.feature_layers), info.feature_size) == ([], 0)
    assert list(info.strategies) == ["hybrid", "model", "ngram", "none"]
    assert info.default_strategy == "ngram"


@pytest.mark.parametrize("strategy", ["ngram", "none"])
async def test_strategies_without_a_model_leave_states_alone(reading: Path, strategy: str) -> None:
    async with drafting(model=str(reading), dtype="float32") as draft:
        (answer,) = await propose(draft, item(strategy, features=states(len(PROMPT) - 1)))
        (later,) = await propose(draft, item("features"))
    assert not answer.result.used_features
    assert later.result.used_features


@pytest.mark.parametrize(("kind", "default"), [("reading", "model"), ("plain", "features")])
def test_a_default_strategy_that_the_draft_does_not_offer_is_refused(
    kind: str, default: str, request: pytest.FixtureRequest
) -> None:
    directory: Path = request.getfixturevalue(kind)
    settings = DraftSettings.model_validate(
        {"model": str(directory), "dtype": "float32", "default_strategy": default}
    )
    with pytest.raises(UnsupportedModel, match=f"--default-strategy: must be one of .*, got {default}"):
        load_strategies(settings)


async def test_states_that_wait_are_read_by_weights_that_are_loaded_meanwhile(
    plain: Path, reading: Path, tmp_path: Path
) -> None:
    """They are the target's, so any draft that reads the same layers may read them."""
    other = save_feature_draft(plain, tmp_path / "other", LAYERS, size=1.0, seed=1)
    (other / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    whole = states(len(PROMPT) - 1)
    async with drafting(model=str(other), dtype="float32") as fresh:
        (expected,) = await propose(fresh, item(features=whole))
    async with (
        draft_server(model=str(reading), dtype="float32", max_load_mib=1) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        draft = rpc.DraftStub(channel)
        (before,) = await propose(draft, item(features=whole, session_id="b"))
        await propose(draft, item("ngram", features=whole))
        await send_draft(channel, other)
        (after,) = await propose(draft, item())
        (without,) = await propose(draft, item(session_id="b"))
    assert after.result.used_features
    assert after.result.draft_tokens == expected.result.draft_tokens != before.result.draft_tokens
    assert not without.result.used_features

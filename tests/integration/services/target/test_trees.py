"""Trees of draft tokens through the real service: the same tokens, invalid trees refused or dropped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import grpc
import pytest

from galley.core.hints import HintTail
from galley.pb.galley.v1 import galley_pb2 as pb
from galley.pb.galley.v1 import galley_pb2_grpc as rpc
from services.target.engine.protocol import Limits
from tests.fakes.draft_trees import random_tree
from tests.fakes.tiny_model import VOCAB, greedy
from tests.fakes.verify_items import extension, generate, slice_of, stream_of, tokens_of, verify
from tests.integration.services.target.conftest import Recording, Served, pages

PROMPT = [5, 9, 2, 33, 17]
COUNT = 24
SAMPLED = pb.SamplingParams(temperature=1.0, top_p=0.95, seed=11)


@pytest.fixture(scope="session")
def answer(tiny: Path) -> list[int]:
    return greedy(tiny, PROMPT, COUNT)


def tree_item(tokens: list[int], tree: HintTail, **given: Any) -> pb.VerifyItem:
    return pb.VerifyItem(
        slice=slice_of(tokens, **given),
        draft_tokens=tree.draft_tokens,
        survival=tree.survival,
        parents=tree.parents,
    )


async def of_trees(
    target: rpc.TargetAsyncStub, plain: list[int], seed: int, sampling: pb.SamplingParams
) -> tuple[list[int], int]:
    """Return what trees that are half right confirm after the prompt, and how many draft tokens of them."""
    rng, tokens, held, accepted = random.Random(seed), list(PROMPT), 0, 0
    while len(tokens) < len(PROMPT) + COUNT:
        tree = random_tree(rng, plain[len(tokens) - len(PROMPT) :], 8, vocab=VOCAB - 1)
        item = tree_item(
            tokens,
            tree,
            start=held,
            session_id=f"trees {seed}",
            sampling=sampling,
            prompt_len=len(PROMPT),
            max_position=len(PROMPT) + COUNT,
        )
        (got,) = await verify(target, item)
        assert got.WhichOneof("outcome") == "result", got
        tokens += got.result.tokens
        held, accepted = got.result.kv_len, accepted + got.result.accepted
    return tokens[len(PROMPT) :], accepted


async def test_trees_change_no_token(target: rpc.TargetAsyncStub, answer: list[int]) -> None:
    sampled, _ = await generate(target, PROMPT, COUNT, lambda _: [], sampling=SAMPLED)
    for seed in range(3):
        tokens, accepted = await of_trees(target, answer, seed, pb.SamplingParams(temperature=0))
        assert tokens == answer
        assert accepted
        tokens, accepted = await of_trees(target, sampled, seed, SAMPLED)
        assert tokens == sampled
        assert accepted


BAD = [
    ("parents", [1, 2, 3], [-1, 0]),
    ("parents[0]", [1, 2], [0, 0]),
    ("parents[1]", [1, 2, 3], [-1, 2, 1]),
    ("parents[1]", [1, 2], [-1, -2]),
    ("parents[2]", [1, 2, 1], [-1, 0, -1]),
    ("parents[8]", list(range(9)), [-1] * 9),
]


@pages
@pytest.mark.parametrize("limits", [Limits(max_draft_tokens=16)])
@pytest.mark.parametrize(("field", "tokens", "parents"), BAD)
async def test_an_invalid_tree_is_refused_by_name_before_any_work(
    target: rpc.TargetAsyncStub, engine: Recording, field: str, tokens: list[int], parents: list[int]
) -> None:
    item = pb.VerifyItem(slice=slice_of(PROMPT), draft_tokens=tokens, parents=parents)
    (refused,) = await verify(target, item)
    assert refused.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert refused.status.message.startswith(f"{field}: must")
    assert not engine.passes


@pytest.mark.parametrize(("_field", "tokens", "parents"), BAD)
async def test_a_hint_that_is_no_tree_is_dropped(
    target: rpc.TargetAsyncStub, answer: list[int], _field: str, tokens: list[int], parents: list[int]
) -> None:
    sent = extension(PROMPT, tokens, limit=len(PROMPT) + 6)
    sent.hint.parents[:] = parents
    async with stream_of(target) as stream:
        await stream.send(pb.VerifyItem(slice=slice_of(PROMPT), credit=5), extensions=[sent])
        answers = await stream.until_last()
    assert tokens_of(answers) == answer[:6]
    assert all(one.result.verified == 0 for one in answers)


async def test_a_target_says_whether_it_takes_trees(target: rpc.TargetAsyncStub, service: Served) -> None:
    info = await target.GetTargetInfo(pb.GetTargetInfoRequest())
    assert info.trees == service.running.service.lease("here").trees  # type: ignore[attr-defined]  # a TargetService

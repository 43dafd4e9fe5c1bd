"""Trees of draft tokens over real gRPC: only to targets that take them, and never of harm."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from galley.client.options import Speculation
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.truth import VOCAB
from tests.fakes.world import World, any_credit, must_be_true, receive

LISTS = Speculation(k=4, width=2)


def beside_the_first(item: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    """Put a wrong candidate beside the first token, and name its parents."""
    result = answer.result
    if item.width < 2 or not result.draft_tokens:
        return
    wrong = (result.draft_tokens[0] + 1) % VOCAB
    right = list(result.draft_tokens)[: item.k - 1]
    result.draft_tokens[:] = [*right, wrong]
    result.parents[:] = [*range(-1, len(right) - 1), -1]
    result.survival[:] = [0.9 - 0.1 * i for i in range(len(right) + 1)]


def cyclic(item: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    beside_the_first(item, answer)
    answer.result.parents[:] = [len(answer.result.parents)] * len(answer.result.parents)


def far_away(item: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    beside_the_first(item, answer)
    answer.result.parents[:] = [-(2**31)] * len(answer.result.parents)


def oversized(item: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    answer.result.draft_tokens[:] = [1] * 1000
    answer.result.parents[:] = [-1] * 1000
    answer.result.survival[:] = [0.5] * 1000


def sent(world: World) -> list[pb.VerifyItem | pb.Hint]:
    hints = [extension.hint for extension in world.target.extensions if extension.HasField("hint")]
    return [message for message in (*world.target.calls, *hints) if message.draft_tokens]


@any_credit
@pytest.mark.parametrize("trees", [True, False])
async def test_only_targets_that_take_trees_are_sent_them(world: World, trees: bool, credit: int) -> None:
    world.target.trees = trees
    world.target.pass_s = 0.002
    world.draft.corrupt = beside_the_first
    gateway = await world.gateway(credit=credit)
    must_be_true(await receive(gateway.generate(speculation=LISTS)))
    assert any(item.width == 2 for item in world.draft.calls)
    assert any(message.parents for message in sent(world)) == trees
    assert all(
        not message.parents or len(message.parents) == len(message.draft_tokens) for message in sent(world)
    )


async def test_after_a_target_without_trees_drafts_are_asked_for_chains(world: World) -> None:
    world.draft.corrupt = beside_the_first
    gateway = await world.gateway(credit=0)
    must_be_true(await receive(gateway.generate(speculation=LISTS)))
    before = len(world.draft.calls)
    assert world.draft.calls[0].width == 2
    must_be_true(await receive(gateway.generate(speculation=LISTS)))
    assert {item.width for item in world.draft.calls[before:]} == {0}


@any_credit
@pytest.mark.parametrize("corrupt", [cyclic, far_away, oversized], ids=lambda corrupt: corrupt.__name__)
async def test_an_invalid_tree_changes_nothing(
    world: World, corrupt: Callable[[pb.ProposeItem, pb.ProposeAnswer], None], credit: int
) -> None:
    world.target.trees = True
    world.draft.corrupt = corrupt
    gateway = await world.gateway(credit=credit)
    must_be_true(await receive(gateway.generate(speculation=LISTS)))

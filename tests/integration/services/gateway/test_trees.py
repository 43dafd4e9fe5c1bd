"""Trees of draft tokens over real gRPC: only to targets that take them, and never of harm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from galley.client.options import Speculation
from galley.common.metrics import catalogue
from galley.common.metrics.labels import GATEWAY
from galley.common.metrics.registry import Registry
from galley.core import names
from galley.pb.galley.v1 import galley_pb2 as pb
from tests.fakes.readings import number, total
from tests.fakes.spans import KeptSpans, attributes_of
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


def before_each(item: pb.ProposeItem, answer: pb.ProposeAnswer) -> None:
    """Put a wrong candidate before each token."""
    result = answer.result
    if item.width < 2 or not result.draft_tokens:
        return
    right = list(result.draft_tokens)[: max(1, item.k // 2)]
    tokens = [token for at in right for token in ((at + 1) % VOCAB, at)]
    result.draft_tokens[:] = tokens
    result.parents[:] = [2 * (node // 2) - 1 for node in range(len(tokens))]
    result.survival[:] = [0.9 - 0.05 * node for node in range(len(tokens))]


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
    world.target.pass_s = 0.01
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


@any_credit
async def test_draft_tokens_of_trees_are_counted_by_position_and_rank(world: World, credit: int) -> None:
    world.target.trees = True
    world.target.pass_s = 0.01
    world.draft.corrupt = before_each
    registry, spans = Registry(GATEWAY), KeptSpans()
    gateway = await world.gateway_of(replace(spans.parts(), metrics=registry), credit=credit)
    received = await receive(gateway.generate(speculation=Speculation(k=8, width=2)))
    must_be_true(received)
    await gateway.idle()
    stats = received.end.speculation
    verified, accepted = list(stats.verified_by_rank), list(stats.accepted_by_rank)
    assert (sum(verified), sum(accepted)) == (stats.verified, stats.accepted)
    assert (len(verified), len(accepted)) == (2, 2)
    assert 0 < accepted[1] <= verified[1], "second candidates were right"
    assert sum(stats.accepted_at) == stats.accepted
    assert sum(stats.verified_at) < stats.verified, "a position counts once a round"
    assert max(stats.verified_at) <= stats.rounds
    for rank in range(2):
        assert number(registry, catalogue.VERIFIED_BY_RANK, str(rank)) == verified[rank]
        assert number(registry, catalogue.ACCEPTED_BY_RANK, str(rank)) == accepted[rank]
    assert total(registry, catalogue.VERIFIED_AT) == sum(stats.verified_at)
    [request] = await spans.requests()
    ranks = tuple(f"{rank} {accepted[rank]}/{verified[rank]}" for rank in range(2))
    assert attributes_of(request)[names.RANKS] == ranks
    rounds = [attributes_of(span) for span in spans.rounds(request)]
    assert any(names.ROUND_DEPTH in of and len(of[names.ROUND_RANKS]) == 2 for of in rounds)

"""Trees of draft tokens: the walk by equality, subtrees, order; a chain is the case of one child a node."""

from __future__ import annotations

import random

import pytest

from galley.core.hints import NOTHING, Hint, HintTail
from galley.core.trees import (
    CHAIN,
    ROOT,
    best_first,
    candidates_after,
    chances,
    depths,
    follow,
    main_path,
    path_to,
    ranks,
    simplified,
    subtree,
    valid_count,
)
from tests.fakes.draft_trees import random_tree

SEEDS = range(200)
# 7 follows the root, or 8; after 7 comes 1 or 2, after 8 only 1; 3 follows (7, 2).
TOKENS = (7, 8, 1, 2, 1, 3)
PARENTS = (ROOT, ROOT, 0, 0, 1, 3)
SURVIVAL = (0.6, 0.3, 0.3, 0.24, 0.15, 0.12)
TREE = HintTail(TOKENS, SURVIVAL, parents=PARENTS)


def tree_of(seed: int) -> HintTail:
    rng = random.Random(seed)
    return random_tree(rng, [rng.randrange(4) for _ in range(6)], 16, vocab=4)


def all_paths(tree: HintTail) -> list[tuple[int, ...]]:
    return [
        tuple(tree.draft_tokens[node] for node in path_to(tree.parents, end))
        for end in range(len(tree.draft_tokens))
    ]


def test_a_tree_in_full() -> None:
    assert depths(PARENTS, 6) == [0, 0, 1, 1, 1, 2]
    assert ranks(PARENTS, 6) == [0, 1, 0, 1, 0, 0]
    assert path_to(PARENTS, 5) == [0, 3, 5]
    assert main_path(PARENTS, 6) == [0, 2]
    assert follow(TOKENS, PARENTS, [7, 2, 3, 9]) == [0, 3, 5]
    assert follow(TOKENS, PARENTS, [8, 2]) == [1]
    assert follow(TOKENS, PARENTS, [9]) == []
    assert subtree(PARENTS, 6, 0) == ([2, 3, 5], (ROOT, ROOT, 1))
    assert subtree(PARENTS, 6, 1) == ([4], CHAIN)
    assert chances(PARENTS, SURVIVAL) == pytest.approx([0.6, 0.3, 0.5, 0.4, 0.5, 0.5])


@pytest.mark.parametrize(
    ("tokens", "parents", "count"),
    [
        ((1, 2, 3), CHAIN, 3),
        ((1, 2, 3), (-1, 0, 1), 3),
        ((1, 2, 3), (-1, 0), 0),
        ((1, 2, 3), (-2, 0, 1), 0),
        ((1, 2, 3), (-1, 1, 0), 1),
        ((1, 2, 3), (-1, 2, 1), 1),
        ((1, 2, 1), (-1, -1, -1), 2),
        ((1, 2, 1), (-1, -1, 1), 3),
        ((), (), 0),
        ((), (-1,), 0),
    ],
)
def test_only_earlier_parents_and_different_siblings_are_a_tree(
    tokens: tuple[int, ...], parents: tuple[int, ...], count: int
) -> None:
    assert valid_count(tokens, parents) == count


@pytest.mark.parametrize("seed", SEEDS)
def test_every_confirmed_prefix_of_a_path_is_followed_and_nothing_else(seed: int) -> None:
    tree, rng = tree_of(seed), random.Random(seed)
    paths = {(), *all_paths(tree)}
    for _ in range(20):
        confirmed = tuple(rng.randrange(4) for _ in range(rng.randint(0, 6)))
        if rng.random() < 0.5 and paths:
            confirmed = (*rng.choice(sorted(paths)), *confirmed)
        path = tree.follow(confirmed)
        taken = max((len(known) for known in paths if confirmed[: len(known)] == known), default=0)
        assert len(path) == taken
        assert [tree.draft_tokens[node] for node in path] == list(confirmed[:taken])
        assert not path or path == path_to(tree.parents, path[-1])


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_left_below_a_node_has_the_paths_that_go_through_it(seed: int) -> None:
    tree = tree_of(seed)
    for node, through in enumerate(all_paths(tree)):
        left = tree.below(node)
        count = len(through)
        expected = {path[count:] for path in all_paths(tree) if path[:count] == through} - {()}
        assert set(all_paths(left)) == expected
        assert valid_count(left.draft_tokens, left.parents) == len(left.draft_tokens) == len(expected)
        for index, kept in enumerate(subtree(tree.parents, len(tree.draft_tokens), node)[0]):
            assert left.survival[index] == pytest.approx(tree.survival[kept] / tree.survival[node])


@pytest.mark.parametrize("seed", SEEDS)
def test_each_first_part_of_a_tree_is_a_tree(seed: int) -> None:
    tree = tree_of(seed)
    for count in range(len(tree.draft_tokens) + 1):
        part = tree.first(count)
        assert all_paths(part) == all_paths(tree)[:count]
        assert valid_count(part.draft_tokens, part.parents) == count


@pytest.mark.parametrize("seed", SEEDS)
def test_children_ranks_and_the_main_path_agree(seed: int) -> None:
    tree = tree_of(seed)
    parents, count = tree.parents, len(tree.draft_tokens)
    rank = ranks(parents, count)
    for node in (ROOT, *range(count)):
        assert [rank[child] for child in candidates_after(parents, count, node)] == list(
            range(len(candidates_after(parents, count, node)))
        )
    path = main_path(parents, count)
    assert [rank[node] for node in path] == [0] * len(path)
    assert not path or not candidates_after(parents, count, path[-1])
    assert tree.main.draft_tokens == tuple(tree.draft_tokens[node] for node in path)
    assert tree.main.parents == CHAIN


@pytest.mark.parametrize("seed", SEEDS)
def test_best_first_order_has_the_same_paths_and_chances_that_fall(seed: int) -> None:
    tree, rng = tree_of(seed), random.Random(seed)
    given = [rng.random() for _ in tree.draft_tokens]
    order, parents, survival = best_first(tree.parents, given)
    tokens = tuple(tree.draft_tokens[node] for node in order)
    assert survival == sorted(survival, reverse=True)
    assert valid_count(tokens, parents) == len(tokens)
    assert sorted(all_paths(HintTail(tokens, parents=parents))) == sorted(all_paths(tree))
    for node, likely in zip(order, survival, strict=True):
        assert likely == min(given[before] for before in path_to(tree.parents, node))


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_chain_and_its_parents_are_the_same(length: int) -> None:
    explicit = tuple(range(-1, length - 1))
    assert simplified(explicit) == CHAIN
    tokens = tuple(range(10, 10 + length))
    for parents in (CHAIN, explicit):
        assert depths(parents, length) == main_path(parents, length) == list(range(length))
        assert ranks(parents, length) == [0] * length
        assert follow(tokens, parents, [*tokens[:3], 1]) == list(range(min(3, length)))
        for node in range(length):
            assert list(candidates_after(parents, length, node)) == [node + 1][: length - 1 - node]
            assert subtree(parents, length, node) == (list(range(node + 1, length)), CHAIN)


def test_a_hint_ends_where_its_main_path_ends() -> None:
    hint = Hint(10, b"", TOKENS, SURVIVAL, parents=PARENTS)
    assert hint.end == 12
    assert hint.whole == TREE
    assert hint.tail(1) == TREE.below(0) == HintTail((1, 2, 3), (0.5, 0.4, 0.2), parents=(-1, -1, 1))
    assert hint.tail(2) == NOTHING
    assert hint.tail(3) == NOTHING
    assert [hint.chance(node) for node in range(6)] == pytest.approx(chances(PARENTS, SURVIVAL))

"""Trees of draft tokens: several candidates for a position, of which the target takes at most one.

Node i of a tree has a token and a parent `parents[i]` < i; the parent -1 is the last confirmed token. No two
children of a node have the same token. Empty parents are a chain: node i follows node i - 1. Nodes are in
best-first order: none is likelier to be accepted than one before it, so the first n nodes are the best tree
of n nodes, and the first child of each node is its likeliest.

A draft that knows the noise of a position proposes the best candidates by log q + g. The target's token is
its own, whatever was proposed, so a tree is as lossless as a chain (docs/concepts/known-noise-trees.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Parents: TypeAlias = tuple[int, ...]

CHAIN: Parents = ()
ROOT = -1
# The most draft tokens for one position.
MAX_WIDTH = 8


def parent_of(parents: Sequence[int], node: int) -> int:
    return parents[node] if parents else node - 1


def child_of(tokens: Sequence[int], parents: Sequence[int], node: int, token: int) -> int | None:
    """Return the child of `node` that has the token, None if none has it."""
    candidates = candidates_after(parents, len(tokens), node)
    return next((candidate for candidate in candidates if tokens[candidate] == token), None)


def children_of(parents: Sequence[int], count: int) -> dict[int, list[int]]:
    """Return the children, in order, of each of `count` nodes and of the root."""
    children: dict[int, list[int]] = {node: [] for node in range(ROOT, count)}
    for node in range(count):
        children[parent_of(parents, node)].append(node)
    return children


def valid_count(tokens: Sequence[int], parents: Sequence[int]) -> int:
    """Return how many of the first nodes are a tree: all, unless a parent is not an earlier node.

    A node with the token of a sibling ends it too. Of a wrong number of parents, no node is valid.
    """
    if not parents:
        return len(tokens)
    if len(parents) != len(tokens):
        return 0
    seen: set[tuple[int, int]] = set()
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not ROOT <= parent < node or (parent, token) in seen:
            return node
        seen.add((parent, token))
    return len(tokens)


def simplified(parents: Sequence[int]) -> Parents:
    """Return CHAIN if each node follows the one before it, else the parents."""
    return CHAIN if all(parent == node - 1 for node, parent in enumerate(parents)) else tuple(parents)


def depths(parents: Sequence[int], count: int) -> list[int]:
    """Return for each of `count` nodes how many nodes are before it on its path."""
    if not parents:
        return list(range(count))
    found: list[int] = []
    for parent in parents[:count]:
        found.append(0 if parent == ROOT else found[parent] + 1)
    return found


def ranks(parents: Sequence[int], count: int) -> list[int]:
    """Return for each of `count` nodes how many siblings are before it."""
    if not parents:
        return [0] * count
    children: dict[int, int] = {}
    found: list[int] = []
    for parent in parents[:count]:
        rank = children.get(parent, 0)
        found.append(rank)
        children[parent] = rank + 1
    return found


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the first one of the path to `node`, itself included; none for ROOT."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parent_of(parents, node)
    return path[::-1]


def follow(tokens: Sequence[int], parents: Sequence[int], confirmed: Sequence[int]) -> list[int]:
    """Return the path that `confirmed` tokens take through the tree, up to the first that no node has."""
    path: list[int] = []
    at, node = ROOT, 0
    for token in confirmed:
        # Children come after their parent.
        while node < len(tokens) and (tokens[node] != token or parent_of(parents, node) != at):
            node += 1
        if node == len(tokens):
            break
        path.append(node)
        at, node = node, node + 1
    return path


def main_path(parents: Sequence[int], count: int) -> list[int]:
    """Return the chain that takes the likeliest child of each node, the first one, to its end."""
    if not parents:
        return list(range(count))
    path: list[int] = []
    at = ROOT
    for node, parent in enumerate(parents[:count]):
        if parent == at:
            path.append(node)
            at = node
    return path


def candidates_after(parents: Sequence[int], count: int, node: int) -> Sequence[int]:
    """Return the candidates for the token after `node`, the likeliest first."""
    if not parents:
        return range(node + 1, min(node + 2, count))
    return [other for other in range(node + 1, count) if parents[other] == node]


def subtree(parents: Sequence[int], count: int, node: int) -> tuple[list[int], Parents]:
    """Return the nodes below `node`, in order, and their parents among themselves."""
    below = {node}
    nodes: list[int] = []
    for other in range(node + 1, count):
        if parent_of(parents, other) in below:
            below.add(other)
            nodes.append(other)
    return nodes, kept(parents, nodes, node)


def kept(parents: Sequence[int], nodes: Sequence[int], root: int = ROOT) -> Parents:
    """Return the parents of `nodes` among themselves, with `root` as their root.

    `nodes` must hold the parent of each of its nodes, unless that is the root.
    """
    place = {node: index for index, node in enumerate(nodes)} | {root: ROOT}
    return simplified([place[parent_of(parents, node)] for node in nodes])


def chances(parents: Sequence[int], survival: Sequence[float]) -> list[float]:
    """Return for each node the chance that it is accepted if its parent is."""
    found: list[float] = []
    for node, reached in enumerate(survival):
        parent = parent_of(parents, node)
        before = 1.0 if parent == ROOT else survival[parent]
        found.append(min(1.0, reached / before) if before > 0.0 else 0.0)
    return found


def best_first(parents: Sequence[int], survival: Sequence[float]) -> tuple[list[int], Parents, list[float]]:
    """Return the order of nodes by falling survival, their parents and survival in that order.

    A node counts as at most as likely as its parent, and equal ones keep their order.
    """
    likely: list[float] = []
    for node, reached in enumerate(survival):
        parent = parent_of(parents, node)
        likely.append(reached if parent == ROOT else min(reached, likely[parent]))
    order = sorted(range(len(likely)), key=lambda node: -likely[node])
    return order, kept(parents, order), [likely[node] for node in order]

"""Random trees of draft tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from galley.core.trees import ROOT, Parents


@dataclass(frozen=True, slots=True)
class RandomTree:
    """Tokens and parents; `path`: the nodes of the tokens that the tree was made around."""

    tokens: list[int]
    parents: Parents
    path: list[int]


def tree_around(rng: random.Random, path: Sequence[int], others: Sequence[int]) -> RandomTree:
    """Return a tree that holds `path` as a path from the root, and `others` anywhere."""
    is_next = [True] * len(path) + [False] * len(others)
    rng.shuffle(is_next)
    following, remaining = iter(path), iter(others)
    tokens: list[int] = []
    parents: list[int] = []
    nodes: list[int] = []
    for node, on_path in enumerate(is_next):
        tokens.append(next(following) if on_path else next(remaining))
        parents.append((nodes[-1] if nodes else ROOT) if on_path else rng.randint(ROOT, node - 1))
        nodes += [node] if on_path else []
    return RandomTree(tokens, tuple(parents), nodes)

"""Random trees of draft tokens, and those of a draft that knows the noise of a small sampled truth."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from heapq import heappop, heappush
from zlib import crc32

from galley.core.content import token_bytes
from galley.core.hints import HintTail
from galley.core.trees import MAX_WIDTH, ROOT, best_first, candidates_after, depths, simplified
from tests.fakes.truth import IDS

# About how often the candidates of `knowing_tree` are right at temperature 1, by rank.
_RIGHT = (0.65, 0.14, 0.08, 0.06, 0.03, 0.02, 0.01, 0.01)


def random_tree(rng: random.Random, true: Sequence[int], most: int, vocab: int = IDS) -> HintTail:
    """Return a tree of at most `most` tokens; about half of them go on with the `true` ones."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(rng.randint(0, most)):
        parent = rng.choice([ROOT, *range(len(tokens))][-4:])
        depth = depths([*parents, parent], len(parents) + 1)[-1]
        is_right = depth < len(true) and rng.random() < 0.6
        token = true[depth] if is_right else rng.randrange(vocab)
        siblings = candidates_after(parents, len(tokens), parent) if parents else []
        if len(siblings) < MAX_WIDTH and all(tokens[node] != token for node in siblings):
            tokens.append(token)
            parents.append(parent)
    survival = sorted((rng.random() for _ in tokens), reverse=True)
    return HintTail(tuple(tokens), tuple(survival), parents=simplified(parents))


def _unit(*numbers: int) -> float:
    return (crc32(token_bytes(numbers)) + 0.5) / 2**32


def _scores(history: Sequence[int], seed: int, blur: float, temperature: float) -> list[float]:
    """Return log p + g of each token; at temperature 0 without noise. `blur` is how wrong p is."""
    position = len(history)
    return [
        4.0 * _unit(*history, token)
        + blur * _unit(1, *history, token)
        - temperature * math.log(-math.log(_unit(2, seed & 0xFFFF, position, token)))
        for token in range(IDS)
    ]


def sampled_id(history: Sequence[int], seed: int, temperature: float) -> int:
    """Return the token of a target whose noise depends on seed and position alone."""
    scores = _scores(history, seed, 0.0, temperature)
    return max(range(IDS), key=scores.__getitem__)


def knowing_tree(
    history: Sequence[int], seed: int, temperature: float, *, nodes: int, width: int, blur: float = 4.0
) -> HintTail:
    """Return the best tree of a draft whose probabilities are wrong, but which knows the noise."""
    tokens: list[int] = []
    parents: list[int] = []
    survival: list[float] = []
    ready: list[tuple[float, int, int]] = []  # (-survival, parent, token)

    def offer(parent: int, context: Sequence[int], reached: float) -> None:
        scores = _scores(context, seed, blur, temperature)
        likely = sorted(range(IDS), key=lambda token: -scores[token])[:width]
        for rank, token in enumerate(likely):
            heappush(ready, (-reached * _RIGHT[rank], parent, token))

    paths: dict[int, list[int]] = {ROOT: []}
    offer(ROOT, history, 1.0)
    while len(tokens) < nodes:
        reached, parent, token = heappop(ready)
        node = len(tokens)
        tokens.append(token)
        parents.append(parent)
        survival.append(-reached)
        paths[node] = [*paths[parent], token]
        offer(node, [*history, *paths[node]], -reached)
    order, moved, likely = best_first(simplified(parents), survival)
    return HintTail(tuple(tokens[node] for node in order), tuple(likely), parents=moved)

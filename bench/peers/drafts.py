"""Draft tokens for answers that are known: right ones, wrong ones, spoiled ones, those of n-gram lookup.

Each returns, for every output position, the draft tokens from there on. How many is drawn anew for each
position, from 0 to MAX_K, so that steps have all mixtures of rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from galley.core.lookup.lookup import SessionLookup

MAX_K = 16
_SPOIL_RATE = 0.3

Drafts = list[list[int]]


def lengths(name: str, count: int) -> list[int]:
    """Return the number of draft tokens at each of `count` positions, the same at every call."""
    drawn = random.Random(name)
    return [drawn.randint(0, MAX_K) for _ in range(count)]


def right(name: str, _prompt: Sequence[int], answer: Sequence[int]) -> Drafts:
    return [list(answer[at : at + k]) for at, k in enumerate(lengths(name, len(answer)))]


def wrong(name: str, prompt: Sequence[int], answer: Sequence[int]) -> Drafts:
    return [[_other(token) for token in draft] for draft in right(name, prompt, answer)]


def spoiled(name: str, prompt: Sequence[int], answer: Sequence[int]) -> Drafts:
    """Return right drafts of which every token may be a wrong one."""
    drawn = random.Random(f"{name}, spoiled")
    return [
        [_other(token) if drawn.random() < _SPOIL_RATE else token for token in draft]
        for draft in right(name, prompt, answer)
    ]


def ngram(name: str, prompt: Sequence[int], answer: Sequence[int]) -> Drafts:
    """Return what followed the last tokens before, in prompt and answer."""
    lookup = SessionLookup()
    lookup.follow(prompt)
    drafts = []
    for token, k in zip(answer, lengths(name, len(answer)), strict=True):
        drafts.append(list(lookup.find((), k).tokens))
        lookup.follow([token])
    return drafts


def _other(token: int) -> int:
    # It exists in every vocabulary of at least two.
    return token - 1 if token else 1


MAKERS: dict[str, Callable[[str, Sequence[int], Sequence[int]], Drafts]] = {
    "right": right,
    "wrong": wrong,
    "spoiled": spoiled,
    "ngram": ngram,
}

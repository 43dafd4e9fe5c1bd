"""Rows of masks after the draft tokens of a tree: row 0 is at its root, row i + 1 after draft token i."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from galley.core.trees import ROOT, Parents, children_of, subtree

Fill: TypeAlias = "Callable[[Sequence[int], Parents, NDArray[np.uint32]], None]"

ALL = np.uint32(0xFFFFFFFF)


def is_set(row: NDArray[np.uint32], token: int) -> bool:
    return bool(row[token >> 5] >> np.uint32(token & 31) & 1)


def fill_row(row: NDArray[np.uint32], is_usual: bool, matcher: LLMatcher) -> bool:
    """Fill a row by a matcher that has read its path; return True if others may follow it.

    The row stays all ones if the path is not allowed. One that its masks allowed (`is_usual`) always is.
    """
    row[:] = ALL
    if is_usual or not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    return not matcher.is_error() and not matcher.is_stopped()


def fill_tree(tokens: Sequence[int], parents: Parents, rows: NDArray[np.uint32], matcher: LLMatcher) -> None:
    """Fill the rows depth first: the matcher reads the token of each node that is allowed, and goes back."""
    children = children_of(parents, len(tokens))
    matcher.unsafe_compute_mask_ptr(rows[0].ctypes.data, rows[0].nbytes)
    waiting = [iter(children[ROOT])]
    while waiting:
        node = next(waiting[-1], None)
        if node is None:
            waiting.pop()
            if waiting:
                matcher.rollback(1)
        elif not matcher.is_stopped() and matcher.try_consume_tokens([tokens[node]]):
            row = rows[node + 1]
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            waiting.append(iter(children[node]))


def fill_below(
    node: int, tokens: Sequence[int], parents: Parents, rows: NDArray[np.uint32], fill: Fill
) -> None:
    """Fill the rows of a node and of those below it, by a function that takes them for a tree."""
    below, among = subtree(parents, len(tokens), node)
    index = [node + 1, *(other + 1 for other in below)]
    part = np.full((len(index), rows.shape[1]), ALL, np.uint32)
    fill([tokens[other] for other in below], among, part)
    rows[index] = part

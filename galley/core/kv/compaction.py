"""Compaction: the accepted tokens of a tree get the slots that they would have in a chain."""

from __future__ import annotations

from collections.abc import Sequence

from galley.core.step import TokenMove


def compaction(blocks: Sequence[int], block_tokens: int, root: int, path: Sequence[int]) -> list[TokenMove]:
    """Return the moves of the nodes of an accepted `path`, in order; those in place stay.

    Node i lies in slot root + i of the block table `blocks`. The path is to lie in the slots from root on. In
    this order no move overwrites what a later one reads, because the nodes of a path rise.
    """
    moves: list[TokenMove] = []
    for index, node in enumerate(path):
        if node != index:
            source, target = divmod(root + node, block_tokens), divmod(root + index, block_tokens)
            moves.append(TokenMove(blocks[source[0]], source[1], blocks[target[0]], target[1]))
    return moves

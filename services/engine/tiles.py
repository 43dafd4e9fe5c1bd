"""The grid on which attention is computed, so that a position's bits do not depend on its company.

Products of another shape may round differently. So the shape of every product is made a function of the
position alone: queries stand in tiles of TILE positions, at slot position % TILE, whether or not the other
slots are asked for; a tile attends to all keys from 0 to the end of its own page of PAGE positions, those of
the future masked. A masked key has weight exactly 0, an unasked slot is a row of its own, and neither changes
a bit of another. (docs/decisions/003-engine-seam.md)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# 4 is the least that costs nothing: a decoding step fills one slot, a verification of 5 tokens two tiles.
TILE = 4
PAGE = 64


def pages_up(length: int) -> int:
    """`length` rounded up to whole pages."""
    return -(-length // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tiles of one session that end in the same page: one product of queries and keys."""

    span: int
    # In the batch's list of tiles, [first_tile, last_tile).
    first_tile: int
    last_tile: int
    # Of the first slot of the first tile.
    position: int
    # Keys that each of these tiles attends to: [0, keys).
    keys: int


@dataclass(frozen=True, slots=True)
class Grid:
    """Where each row of a batch stands: row r is slot `slots[r]` of tile `tiles[r]`."""

    runs: tuple[Run, ...]
    tiles: tuple[int, ...]
    slots: tuple[int, ...]
    tile_count: int


def lay_out(spans: Sequence[tuple[int, int]]) -> Grid:
    """The grid of a batch of `spans` (first position, number of rows), whose rows follow one another."""
    runs: list[Run] = []
    tiles: list[int] = []
    slots: list[int] = []
    count = 0
    for index, (start, rows) in enumerate(spans):
        first = start // TILE
        last = (start + rows - 1) // TILE + 1
        tiles += [count + position // TILE - first for position in range(start, start + rows)]
        slots += [position % TILE for position in range(start, start + rows)]
        runs += _runs(index, first, last, count)
        count += last - first
    return Grid(tuple(runs), tuple(tiles), tuple(slots), count)


def _runs(span: int, first: int, last: int, offset: int) -> list[Run]:
    per_page = PAGE // TILE
    runs = []
    tile = first
    while tile < last:
        end = min(last, (tile // per_page + 1) * per_page)
        runs.append(Run(span, offset + tile - first, offset + end - first, tile * TILE, pages_up(end * TILE)))
        tile = end
    return runs

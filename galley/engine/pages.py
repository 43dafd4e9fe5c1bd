"""Lay out the rows of one step: their positions, blocks and slots, and the tiles that attention processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from galley.core.kv.blocks import BLOCK_TOKENS

Ints = NDArray[np.int64]

# Query heads of a tile: enough to share a block's keys, few enough to keep the scores in the CPU's cache.
_TILE_HEADS = 24


@dataclass(frozen=True, slots=True)
class Span:
    """`rows` new tokens of one sequence, from position `start`; its KV is in `blocks`."""

    start: int
    rows: int
    blocks: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.rows


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer's attention: query scale, window of keys (None: all), and cap of the scores."""

    scale: float
    window: int | None = None
    softcap: float | None = None


def tile_rows(group: int) -> int:
    """Return how many rows of a sequence attention processes together, for `group` query heads a KV head."""
    return max(1, _TILE_HEADS // group)


@dataclass(frozen=True, slots=True)
class Pages:
    """A step's rows, span after span, as the kernels read them.

    positions: [rows]; places: [rows, 2] block and slot; tables: the spans' block tables end to end; tiles:
    [tiles, 4] first row, rows, position of the first row, start of its table. longest: most keys that a row
    sees; work: their sum over the rows.
    """

    spans: tuple[Span, ...]
    positions: Ints
    places: Ints
    tables: Ints
    tiles: Ints
    longest: int
    work: int

    @property
    def rows(self) -> int:
        return len(self.positions)


def lay_out(spans: Sequence[Span], rows_of_tile: int) -> Pages:
    blocks: list[int] = []
    tiles: list[tuple[int, int, int, int]] = []
    of_span: list[tuple[int, int, int]] = []
    row = 0
    for span in spans:
        of_span.append((span.rows, span.start - row, len(blocks)))
        for first in range(0, span.rows, rows_of_tile):
            rows = min(rows_of_tile, span.rows - first)
            tiles.append((row + first, rows, span.start + first, len(blocks)))
        row += span.rows
        blocks += span.blocks[: -(-span.end // BLOCK_TOKENS)]
    counts, shifts, table_at = np.array(of_span, dtype=np.int64).T
    positions = np.arange(row, dtype=np.int64) + np.repeat(shifts, counts)
    tables = np.array(blocks, dtype=np.int64)
    places = np.empty((row, 2), np.int64)
    places[:, 0] = tables[np.repeat(table_at, counts) + positions // BLOCK_TOKENS]
    places[:, 1] = positions % BLOCK_TOKENS
    return Pages(
        tuple(spans),
        positions,
        places,
        tables,
        np.array(tiles, dtype=np.int64),
        longest=max(span.end for span in spans),
        work=sum(span.rows * span.end for span in spans),
    )

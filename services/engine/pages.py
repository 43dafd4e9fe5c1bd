"""Where the rows of one pass stand: positions, blocks and slots, and the tiles that attention takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from services.core.blocks import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

# Query heads of one tile: enough to share a block's keys, few enough for the scores to stay in the cache.
_TILE_HEADS = 24


@dataclass(frozen=True, slots=True)
class Span:
    """`rows` new tokens of one sequence, from position `start`; its KV lies in `blocks`."""

    start: int
    rows: int
    blocks: Sequence[int]

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.start + self.rows


def tile_rows(group: int) -> int:
    """Rows of one sequence that attention takes together, for `group` query heads a kv head."""
    return max(1, _TILE_HEADS // group)


@dataclass(frozen=True, slots=True)
class Pages:
    """A pass's rows, span after span, as the kernels want them.

    positions: [rows]; places: [rows, 2] block and slot; tables: the spans' block tables end to end;
    tiles: [tiles, 4] first row, rows, position of the first row, where its table begins. longest: the most
    keys that a row sees; work: keys seen, summed over the rows.
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
        """Rows of the pass."""
        return len(self.positions)


def lay_out(spans: Sequence[Span], rows_of_tile: int) -> Pages:
    """The pages of these spans, each of at least one row."""
    tables = [np.array(span.blocks[: -(-span.end // BLOCK_TOKENS)], dtype=np.int64) for span in spans]
    positions = [np.arange(span.start, span.end, dtype=np.int64) for span in spans]
    places = np.concatenate(
        [
            np.stack((table[own // BLOCK_TOKENS], own % BLOCK_TOKENS), axis=1)
            for table, own in zip(tables, positions, strict=True)
        ]
    )
    tiles: list[tuple[int, int, int, int]] = []
    row = table_at = 0
    for span, table in zip(spans, tables, strict=True):
        for first in range(0, span.rows, rows_of_tile):
            rows = min(rows_of_tile, span.rows - first)
            tiles.append((row + first, rows, span.start + first, table_at))
        row += span.rows
        table_at += len(table)
    return Pages(
        tuple(spans),
        np.concatenate(positions),
        places,
        np.concatenate(tables),
        np.array(tiles, dtype=np.int64),
        longest=max(span.end for span in spans),
        work=sum(span.rows * span.end for span in spans),
    )

"""A pass over pages as one buffer of int32 numbers of a fixed shape, for a device to be given in one copy.

Attention takes tiles of query slots. A tile holds rows of one sequence, each as `group` slots: the query
heads that share a key head, so that a tile reads a key once. Slots beyond a tile's rows see nothing, nor do
the slots of the tile after the last, to which all rows belong that only fill the pass up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from galley.core.kv.blocks import BLOCK_TOKENS
from galley.engine.pages import Pages

T = TypeVar("T")

# A product of tensor cores has 16 rows or more.
NARROW, WIDE = 16, 64
TILES, _WIDTH = 8, 16
NOWHERE = -1
_ALIGNED = 4  # numbers


@dataclass(frozen=True, slots=True)
class PassShape:
    """`rows` fed, of which the logits of `wanted` are; `tiles` of `slots` slots; `width` blocks a table."""

    rows: int
    wanted: int
    tiles: int
    slots: int
    width: int


class Inputs(NamedTuple, Generic[T]):
    """What a pass is told, as sections of its buffer. Where there are more than needed they are filled up."""

    tokens: T  # [rows]
    positions: T  # [rows]
    places: T  # [rows]: block * BLOCK_TOKENS + slot in it
    wanted: T  # [wanted]: rows
    slots: T  # [rows * group]: of which slot a row's head is
    sources: T  # [tiles * slots]: row * group + head
    queries: T  # [tiles * slots]: positions; NOWHERE: of no row
    firsts: T  # [tiles]: position of the first row
    counts: T  # [tiles]: blocks that its rows see
    tables: T  # [tiles, width]: the blocks of its sequence


def slots_of(group: int, longest: int, *, fixed: bool) -> int:
    """Slots of a tile: NARROW, or WIDE where a sequence has rows for it and tiles need not be `fixed`."""
    narrow = max(NARROW, 1 << (group - 1).bit_length())
    return max(WIDE, narrow) if not fixed and longest * group >= WIDE else narrow


def exact(pages: Pages, wanted: int, slots: int) -> PassShape:
    """The shape of a pass filled up in its tiles and tables alone, so that kernels meet few shapes."""
    tiles = -(-(len(pages.tiles) + 1) // TILES) * TILES
    return PassShape(pages.rows, wanted, tiles, slots, table_width(pages.longest))


def table_width(positions: int) -> int:
    """Entries of a block table of so many positions: a power of two."""
    return max(_WIDTH, 1 << (-(-positions // BLOCK_TOKENS) - 1).bit_length())


def extents(shape: PassShape, group: int) -> Inputs[tuple[int, ...]]:
    """How large each section is."""
    rows, tiles = shape.rows, shape.tiles
    return Inputs(
        tokens=(rows,),
        positions=(rows,),
        places=(rows,),
        wanted=(shape.wanted,),
        slots=(rows * group,),
        sources=(tiles * shape.slots,),
        queries=(tiles * shape.slots,),
        firsts=(tiles,),
        counts=(tiles,),
        tables=(tiles, shape.width),
    )


def numbers(shape: PassShape, group: int) -> int:
    """Numbers of the buffer."""
    return sum(_room(extent) for extent in extents(shape, group))


def sections(buffer: Tensor, shape: PassShape, group: int) -> Inputs[Tensor]:
    """The sections of `buffer` [numbers], as views."""
    sizes = extents(shape, group)
    parts = torch.split(buffer, [_room(size) for size in sizes])
    return Inputs(*(part[: math.prod(size)].view(size) for part, size in zip(parts, sizes, strict=True)))


def _room(extent: tuple[int, ...]) -> int:
    """Sections begin where a kernel may read whole vectors."""
    return -(-math.prod(extent) // _ALIGNED) * _ALIGNED


def fill(
    buffer: Tensor,
    shape: PassShape,
    group: int,
    pages: Pages,
    tokens: Sequence[int],
    wanted: Sequence[int],
    scratch: int,
) -> None:
    """Write a pass of at most `shape` into its `buffer` on the host; `scratch` is the block of nobody."""
    into = Inputs(*(part.numpy() for part in sections(buffer, shape, group)))
    rows = pages.rows
    into.tokens[:] = _padded(tokens, shape.rows)
    into.positions[:] = _padded(pages.positions, shape.rows)
    into.places[:rows] = pages.places[:, 0] * BLOCK_TOKENS + pages.places[:, 1]
    into.places[rows:] = scratch * BLOCK_TOKENS + np.arange(shape.rows - rows) % BLOCK_TOKENS
    into.wanted[:] = _padded(wanted, shape.wanted)
    _fill_tiles(into, shape, group, pages, scratch)


def _padded(values: Sequence[int] | NDArray[np.int64], length: int) -> NDArray[np.int64]:
    padded = np.zeros(length, np.int64)
    padded[: len(values)] = values
    return padded


def _fill_tiles(
    into: Inputs[NDArray[np.int32]], shape: PassShape, group: int, pages: Pages, scratch: int
) -> None:
    used = len(pages.tiles)
    first_rows, rows, positions, tables = pages.tiles.T  # [used] each
    own, head = np.divmod(np.arange(shape.slots), group)  # which of the tile's rows a slot is of
    real = own < rows[:, None]  # [used, slots]
    sources, queries = (part.reshape(shape.tiles, shape.slots) for part in (into.sources, into.queries))
    sources[:], queries[:] = 0, NOWHERE
    sources[:used] = np.where(real, (first_rows[:, None] + own) * group + head, 0)
    queries[:used] = np.where(real, positions[:, None] + own, NOWHERE)
    slots = into.slots.reshape(shape.rows, group)
    slots[:] = used * shape.slots
    tile_of = np.repeat(np.arange(used), rows)  # [rows]
    within = np.arange(len(tile_of)) - first_rows[tile_of]
    slots[: len(tile_of)] = (tile_of * shape.slots + within * group)[:, None] + np.arange(group)
    into.firsts[:], into.counts[:] = 0, 0
    into.firsts[:used] = positions
    into.counts[:used] = (positions + rows - 1) // BLOCK_TOKENS + 1
    into.tables[:] = scratch
    for tile, (at, count) in enumerate(zip(tables.tolist(), into.counts[:used].tolist(), strict=True)):
        into.tables[tile, :count] = pages.tables[at : at + count]

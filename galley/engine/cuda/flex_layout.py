"""A step over pages as one buffer of int32 numbers of a fixed shape, copied to a device at once.

Attention processes tiles of query slots. A tile holds rows of one sequence, each as `group` slots: the query
heads that share a key head, so that a tile reads a key once. Padding rows belong to one more tile after the
last. Its slots, and those beyond a tile's rows, attend to nothing.
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
from galley.core.trees import ROOT, Parents, depths
from galley.engine.pages import Pages, Span

T = TypeVar("T")

# A product on tensor cores has 16 rows or more.
NARROW, WIDE = 16, 64
TILES, _WIDTH = 8, 16
NOWHERE = -1
# No node is entered so late.
NEVER = 2**30
_ALIGNED = 4  # numbers


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step: rows to feed, rows with logits, tiles of `slots` slots, `width` blocks a table.

    `trees`: blocks that hold nodes of trees.
    """

    rows: int
    logit_rows: int
    tiles: int
    slots: int
    width: int
    trees: int = 0


class Inputs(NamedTuple, Generic[T]):
    """A step's inputs, as sections of its buffer; sections longer than needed are padded.

    A walk through a tree, child after child, enters a node before those below it and leaves it after them.
    A query sees a key if the walk enters the query's node while it is below the key's, or at it. Confirmed
    tokens are entered at 0 and never left. The numbers of blocks without nodes come first.
    """

    tokens: T  # [rows]
    positions: T  # [rows]
    places: T  # [rows]: block * BLOCK_TOKENS + slot in it
    logit_rows: T  # [logit_rows]: rows
    slots: T  # [rows * group]: the slot of each row's head
    sources: T  # [tiles * slots]: row * group + head
    queries: T  # [tiles * slots]: positions; NOWHERE: no row
    firsts: T  # [tiles]: position of the first row
    counts: T  # [tiles]: blocks that its rows see
    tables: T  # [tiles, width]: the blocks of its sequence
    entered: T  # [tiles * slots]: when the query's node is entered; empty without trees
    tree_blocks: T  # [trees]
    enter: T  # [(trees + 1) * BLOCK_TOKENS]: when the node of a slot is entered; empty without trees
    leave: T  # likewise
    ahead: T  # likewise: how many slots the node is beyond its position


def slots_of(group: int, longest: int, *, fixed: bool) -> int:
    """Return a tile's slots: WIDE if a sequence has rows for it and tiles are not `fixed`, else NARROW."""
    narrow = max(NARROW, 1 << (group - 1).bit_length())
    return max(WIDE, narrow) if not fixed and longest * group >= WIDE else narrow


def exact(pages: Pages, logit_rows: int, slots: int) -> StepShape:
    """Return the shape of a step padded only in its tiles and tables, so that kernels see few shapes."""
    tiles = -(-(len(pages.tiles) + 1) // TILES) * TILES
    trees = sum(len(tree_blocks(span)) for span in pages.spans)
    # A power of two, so that kernels see few shapes.
    trees = 1 << (trees - 1).bit_length() if trees else 0
    return StepShape(pages.rows, logit_rows, tiles, slots, table_width(pages.longest), trees)


def table_width(positions: int) -> int:
    """Return how many entries a block table has for `positions` tokens: a power of two, at least _WIDTH."""
    return max(_WIDTH, 1 << (-(-positions // BLOCK_TOKENS) - 1).bit_length())


def extents(shape: StepShape, group: int) -> Inputs[tuple[int, ...]]:
    rows, tiles = shape.rows, shape.tiles
    queries, slots = (tiles * shape.slots, (shape.trees + 1) * BLOCK_TOKENS) if shape.trees else (0, 0)
    return Inputs(
        tokens=(rows,),
        positions=(rows,),
        places=(rows,),
        logit_rows=(shape.logit_rows,),
        slots=(rows * group,),
        sources=(tiles * shape.slots,),
        queries=(tiles * shape.slots,),
        firsts=(tiles,),
        counts=(tiles,),
        tables=(tiles, shape.width),
        entered=(queries,),
        tree_blocks=(shape.trees,),
        enter=(slots,),
        leave=(slots,),
        ahead=(slots,),
    )


def numbers(shape: StepShape, group: int) -> int:
    return sum(_aligned_size(extent) for extent in extents(shape, group))


def sections(buffer: Tensor, shape: StepShape, group: int) -> Inputs[Tensor]:
    """Return the sections of `buffer` [numbers], as views."""
    sizes = extents(shape, group)
    parts = torch.split(buffer, [_aligned_size(size) for size in sizes])
    return Inputs(*(part[: math.prod(size)].view(size) for part, size in zip(parts, sizes, strict=True)))


def _aligned_size(extent: tuple[int, ...]) -> int:
    """Return a section's length, rounded up so that the next one is aligned for vector reads."""
    return -(-math.prod(extent) // _ALIGNED) * _ALIGNED


def fill(
    buffer: Tensor,
    shape: StepShape,
    group: int,
    pages: Pages,
    tokens: Sequence[int],
    logit_rows: Sequence[int],
    scratch: int,
) -> None:
    """Write a step of at most `shape` into its `buffer` on the host; padding rows use block `scratch`."""
    into = Inputs(*(part.numpy() for part in sections(buffer, shape, group)))
    rows = pages.rows
    into.tokens[:] = _padded(tokens, shape.rows)
    into.positions[:] = _padded(pages.positions, shape.rows)
    into.places[:rows] = pages.places[:, 0] * BLOCK_TOKENS + pages.places[:, 1]
    into.places[rows:] = scratch * BLOCK_TOKENS + np.arange(shape.rows - rows) % BLOCK_TOKENS
    into.logit_rows[:] = _padded(logit_rows, shape.logit_rows)
    _fill_tiles(into, shape, group, pages, scratch)
    if shape.trees:
        _fill_trees(into, group, pages, scratch)


def _padded(values: Sequence[int] | NDArray[np.int64], length: int) -> NDArray[np.int64]:
    padded = np.zeros(length, np.int64)
    padded[: len(values)] = values
    return padded


def _fill_tiles(
    into: Inputs[NDArray[np.int32]], shape: StepShape, group: int, pages: Pages, scratch: int
) -> None:
    used = len(pages.tiles)
    first_rows, rows, first_slots, tables, _ = pages.tiles.T  # [used] each
    own, head = np.divmod(np.arange(shape.slots), group)  # the tile's row that each slot belongs to
    used_slots = own < rows[:, None]  # [used, slots]
    sources, queries = (part.reshape(shape.tiles, shape.slots) for part in (into.sources, into.queries))
    sources[:], queries[:] = 0, NOWHERE
    rows_of_slots = np.where(used_slots, first_rows[:, None] + own, 0)
    sources[:used] = np.where(used_slots, rows_of_slots * group + head, 0)
    queries[:used] = np.where(used_slots, pages.positions[rows_of_slots], NOWHERE)
    slots = into.slots.reshape(shape.rows, group)
    slots[:] = used * shape.slots
    tile_of = np.repeat(np.arange(used), rows)  # [rows]
    within = np.arange(len(tile_of)) - first_rows[tile_of]
    slots[: len(tile_of)] = (tile_of * shape.slots + within * group)[:, None] + np.arange(group)
    into.firsts[:], into.counts[:] = 0, 0
    into.firsts[:used] = np.minimum.reduceat(pages.positions, first_rows)
    into.counts[:used] = (first_slots + rows - 1) // BLOCK_TOKENS + 1
    into.tables[:] = scratch
    for tile, (at, count) in enumerate(zip(tables.tolist(), into.counts[:used].tolist(), strict=True)):
        into.tables[tile, :count] = pages.tables[at : at + count]


def tree_blocks(span: Span) -> Sequence[int]:
    """Return the blocks that hold nodes of its tree."""
    if not span.parents:
        return ()
    return span.blocks[span.root // BLOCK_TOKENS : (span.end - 1) // BLOCK_TOKENS + 1]


def _fill_trees(into: Inputs[NDArray[np.int32]], group: int, pages: Pages, scratch: int) -> None:
    entered = np.zeros(pages.rows, np.int64)
    enter, leave, ahead = (part.reshape(-1, BLOCK_TOKENS) for part in (into.enter, into.leave, into.ahead))
    enter[:], leave[:], ahead[:], into.tree_blocks[:] = 0, NEVER, 0, scratch
    row, block = 0, 0
    for span in pages.spans:
        blocks = tree_blocks(span)
        if blocks:
            first = span.root // BLOCK_TOKENS * BLOCK_TOKENS
            nodes = slice(span.root - first, span.end - first)
            rows = slice(block + 1, block + 1 + len(blocks))
            into.tree_blocks[block : block + len(blocks)] = blocks
            times = _walk(span.parents)
            for part, numbers in zip((enter, leave), times, strict=True):
                part[rows].reshape(-1)[nodes] = numbers
            ahead[rows].reshape(-1)[nodes] = np.arange(len(span.parents)) - depths(
                span.parents, len(span.parents)
            )
            fed = min(span.rows, len(span.parents))
            entered[row + span.rows - fed : row + span.rows] = times[0][len(span.parents) - fed :]
        row, block = row + span.rows, block + len(blocks)
    # A slot of a query belongs to a row; without one, it sees nothing anyway.
    into.entered[:] = entered[np.minimum(into.sources // group, pages.rows - 1)]


def _walk(parents: Parents) -> tuple[list[int], list[int]]:
    """Return when each node is entered, from 1, and left, by a walk that takes the children in order."""
    size = [1] * len(parents)
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] != ROOT:
            size[parents[node]] += size[node]
    enter: list[int] = []
    free = {ROOT: 1}
    for node, parent in enumerate(parents):
        enter.append(free[parent])
        free[node] = enter[node] + 1
        free[parent] += size[node]
    return enter, [first + count for first, count in zip(enter, size, strict=True)]

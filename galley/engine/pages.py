"""Pages: a pool of keys and values in blocks, and how the rows of a step lie in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from galley.core.kv.blocks import BLOCK_TOKENS
from galley.core.step import TokenMove
from galley.core.trees import CHAIN, ROOT, Parents

Ints = NDArray[np.int64]

# Query heads of a tile: enough to share a block's keys, few enough to keep the scores in the CPU's cache.
_TILE_HEADS = 24
# The kernels take values 32 columns at a time.
_COLUMNS = 32
# The path of a tile whose rows see all slots before their own.
NO_PATHS = -1
_EMPTY_PATHS: Ints = np.empty((0, 2), np.int64)


@dataclass(frozen=True, slots=True)
class Span:
    """`rows` new tokens of one sequence in slots from `start`; its KV is in `blocks`.

    Slots are positions, but for a tree (`StepChunk`), whose nodes lie in slots from `root`.
    """

    start: int
    rows: int
    blocks: Sequence[int]
    parents: Parents = CHAIN

    @property
    def end(self) -> int:
        return self.start + self.rows

    @property
    def root(self) -> int:
        return self.end - len(self.parents)


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

    positions: [rows]; places: [rows, 2] block and slot in it; tables: the spans' block tables end to end;
    tiles: [tiles, 5] first row, rows, slot of the first row, start of its table, path of the first row or
    NO_PATHS. paths: [rows of tiles that have paths, 2 + longest]: root, count, and the slots of the nodes
    that the row sees. longest: most slots of a sequence; work: their sum over the rows.
    """

    spans: tuple[Span, ...]
    positions: Ints
    places: Ints
    tables: Ints
    tiles: Ints
    paths: Ints
    longest: int
    work: int

    @property
    def rows(self) -> int:
        return len(self.positions)


def lay_out(spans: Sequence[Span], rows_of_tile: int) -> Pages:
    blocks: list[int] = []
    tiles: list[tuple[int, int, int, int, int]] = []
    of_span: list[tuple[int, int, int]] = []
    row = 0
    for span in spans:
        of_span.append((span.rows, span.start - row, len(blocks)))
        for first in range(0, span.rows, rows_of_tile):
            rows = min(rows_of_tile, span.rows - first)
            tiles.append((row + first, rows, span.start + first, len(blocks), NO_PATHS))
        row += span.rows
        blocks += span.blocks[: -(-span.end // BLOCK_TOKENS)]
    counts, shifts, table_at = np.array(of_span, dtype=np.int64).T
    slots = np.arange(row, dtype=np.int64) + np.repeat(shifts, counts)
    tables = np.array(blocks, dtype=np.int64)
    places = np.empty((row, 2), np.int64)
    places[:, 0] = tables[np.repeat(table_at, counts) + slots // BLOCK_TOKENS]
    places[:, 1] = slots % BLOCK_TOKENS
    tiled = np.array(tiles, dtype=np.int64)
    positions, paths = slots, _EMPTY_PATHS
    if any(span.parents for span in spans):
        positions, paths = _lay_out_trees(spans, slots, tiled, rows_of_tile)
    return Pages(
        tuple(spans),
        positions,
        places,
        tables,
        tiled,
        paths,
        longest=max(span.end for span in spans),
        work=sum(span.rows * span.end for span in spans),
    )


def _lay_out_trees(spans: Sequence[Span], slots: Ints, tiles: Ints, rows_of_tile: int) -> tuple[Ints, Ints]:
    """Return the rows' positions and paths; write into `tiles` where theirs begin."""
    positions = slots.copy()
    paths: list[list[int]] = []
    row = tile = 0
    for span in spans:
        next_row, next_tile = row + span.rows, tile + -(-span.rows // rows_of_tile)
        if span.parents:
            _lay_out_tree(span, positions[row:next_row], tiles[tile:next_tile], paths)
        row, tile = next_row, next_tile
    if not paths:
        return positions, _EMPTY_PATHS
    table = np.zeros((len(paths), 1 + max(map(len, paths))), np.int64)
    for line, (root, *path) in zip(table, paths, strict=True):
        line[0], line[1] = root, len(path)
        line[2 : 2 + len(path)] = path
    return positions, table


def _lay_out_tree(span: Span, positions: Ints, tiles: Ints, paths: list[list[int]]) -> None:
    """Write the positions of a span's rows; append the paths of tiles in which a row is out of place."""
    root, nodes = span.root, slots_of_paths(span.parents, span.root)
    first = max(span.start, root)
    positions[first - span.start :] = [root + len(path) - 1 for path in nodes[first - root :]]
    for tile in tiles:
        slots = range(tile[2], tile[2] + tile[1])
        # If a node's slot is its position, the slots before it are its ancestors'.
        if positions[slots.start - span.start : slots.stop - span.start].tolist() == list(slots):
            continue
        tile[4] = len(paths)
        paths += ([root, *(nodes[slot - root] if slot >= root else ())] for slot in slots)


def slots_of_paths(parents: Parents, root: int) -> list[list[int]]:
    """Return for each node the slots of its path, itself included."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        above = () if parent == ROOT else found[parent]
        found.append([*above, root + node])
    return found


def lineage(parents: Parents) -> NDArray[np.bool_]:
    """Return [nodes, nodes]: True where the second node is the first or an ancestor of it."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            seen[node] |= seen[parent]
    return seen


@dataclass(frozen=True, slots=True)
class KvShape:
    """The keys and values that one rank stores for a position; `kv_heads` are its own."""

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def value_width(self) -> int:
        return -(-self.value_dim // _COLUMNS) * _COLUMNS

    @property
    def block_bytes(self) -> int:
        numbers = self.layers * self.kv_heads * BLOCK_TOKENS * (self.key_dim + self.value_width)
        return numbers * self.dtype.itemsize


class KvPool:
    """`blocks` blocks of `block_tokens` positions; memory is committed as blocks are first written.

    keys: [layers, blocks, kv_heads, key_dim, block_tokens], so that a query reads a block's keys side by
    side; values: [layers, blocks, kv_heads, block_tokens, value_width]. Unwritten slots hold anything.
    """

    def __init__(self, shape: KvShape, blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.blocks = blocks
        self.block_tokens = BLOCK_TOKENS
        self.keys, self.values = self._allocate(device)

    def _allocate(self, device: torch.device) -> tuple[Tensor, Tensor]:
        shape, blocks = self.shape, self.blocks
        per_layer = shape.layers * blocks * shape.kv_heads * BLOCK_TOKENS
        numbers = torch.empty(
            per_layer * (shape.key_dim + shape.value_width), dtype=shape.dtype, device=device
        )
        keys, values = torch.split(numbers, [per_layer * shape.key_dim, per_layer * shape.value_width])
        head = (shape.layers, blocks, shape.kv_heads)
        return (
            keys.view(*head, shape.key_dim, BLOCK_TOKENS),
            values.view(*head, BLOCK_TOKENS, shape.value_width),
        )

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), one after another."""
        for source, target in pairs:
            self.keys[:, target].copy_(self.keys[:, source])
            self.values[:, target].copy_(self.values[:, source])

    def move(self, moves: Sequence[TokenMove]) -> None:
        """Copy the keys and values of single tokens; reads all slots before it writes any."""
        if moves:
            blocks, slots, to_blocks, to_slots = torch.tensor(moves, device=self.keys.device).unbind(1)
            self.keys[:, to_blocks, :, :, to_slots] = self.keys[:, blocks, :, :, slots]
            self.values[:, to_blocks, :, to_slots] = self.values[:, blocks, :, slots]


class FlatPool(KvPool):
    """A pool that holds the blocks of a head side by side, the last one as scratch for padding rows.

    keys: [layers, kv_heads, blocks + 1, block_tokens, key_dim]; values likewise, value_width wide. All slots
    start as zeros and values are kept finite (`galley.engine.cuda.flex`): a masked value is multiplied by 0.
    """

    @property
    def scratch(self) -> int:
        return self.blocks

    @property
    def positions(self) -> int:
        return (self.blocks + 1) * BLOCK_TOKENS

    def _allocate(self, device: torch.device) -> tuple[Tensor, Tensor]:
        shape = self.shape
        head = (shape.layers, shape.kv_heads, self.blocks + 1, BLOCK_TOKENS)
        keys = torch.zeros(*head, shape.key_dim, dtype=shape.dtype, device=device)
        values = torch.zeros(*head, shape.value_width, dtype=shape.dtype, device=device)
        return keys, values

    def keys_of(self, layer: int) -> Tensor:
        """Return a view [kv_heads, positions, key_dim] of a layer's keys."""
        return self.keys[layer].flatten(1, 2)

    def values_of(self, layer: int) -> Tensor:
        """Return a view [kv_heads, positions, value_dim] of a layer's values."""
        return self.values[layer].flatten(1, 2)[..., : self.shape.value_dim]

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.keys[:, :, target].copy_(self.keys[:, :, source])
            self.values[:, :, target].copy_(self.values[:, :, source])

    def move(self, moves: Sequence[TokenMove]) -> None:
        if moves:
            blocks, slots, to_blocks, to_slots = torch.tensor(moves, device=self.keys.device).unbind(1)
            for part in (self.keys, self.values):
                part[:, :, to_blocks, to_slots] = part[:, :, blocks, slots]

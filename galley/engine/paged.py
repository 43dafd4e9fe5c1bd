"""Attention over pages, for each kind of device, behind one interface."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from galley.core.errors import UnsupportedModel
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.core.trees import depths
from galley.engine.cpu.kernels import openmp
from galley.engine.cpu.kernels.compile import compiled
from galley.engine.cuda import flex
from galley.engine.cuda.device import DeviceOptions
from galley.engine.pages import FlatPool, KvPool, KvShape, Pages, Shape, Span, lay_out, lineage, tile_rows

Floats = NDArray[np.float32]
Stored = NDArray[np.uint16] | NDArray[np.float32]

# Approximate time of one query head with one key.
_KEY_NS = 6


class Attention(Protocol):
    """Attention of new rows to the pool, into which their keys and values are written first."""

    @property
    def pool(self) -> KvPool: ...

    def lay_out(self, spans: Sequence[Span]) -> Pages: ...

    def store_attend(
        self, pages: Pages, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape
    ) -> Tensor:
        """Return [rows, heads, value_dim] of query [rows, heads, key_dim], key, value [rows, kv_heads, ...].

        Rows beyond those of `pages` only pad the step; theirs are zeros.
        """


def as_array(tensor: Tensor) -> Stored:
    """Return a contiguous CPU tensor's memory as the kernels read it: bfloat16 as uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Stored = tensor.numpy()
    return array


def pool_for(shape: KvShape, blocks: int, device: torch.device, options: DeviceOptions) -> KvPool:
    """Return the pool of the fastest attention. Raises UnsupportedModel if that cannot be `invariant`."""
    if device.type == "cuda" and options.flex and flex.can_serve(device, shape):
        return FlatPool(shape, blocks, device)
    if device.type != "cpu" and options.invariant:
        raise UnsupportedModel(f"invariant: must be off on {device}, where FlexAttention does not run")
    return KvPool(shape, blocks, device)


def attention_for(
    pool: KvPool, heads: int, device: torch.device, context: int, *, fixed: bool = False
) -> Attention:
    if isinstance(pool, FlatPool):
        return flex.FlexAttention(pool, heads, fixed=fixed)
    if device.type == "cpu" and pool.shape.dtype in {torch.float32, torch.bfloat16}:
        return CompiledAttention(pool, heads, context)
    return TorchAttention(pool, heads)


class CompiledAttention:
    """The CPU's kernels: a row's bits depend only on its query and the keys and values that it sees."""

    def __init__(self, pool: KvPool, heads: int, context: int) -> None:
        self.pool = pool
        self.group = heads // pool.shape.kv_heads
        self._kernels = compiled()
        self.layers = [
            (as_array(keys), as_array(values)) for keys, values in zip(pool.keys, pool.values, strict=True)
        ]
        self._tile_rows = tile_rows(self.group)
        self._longest = _width(min(context, pool.blocks * BLOCK_TOKENS))
        self._make_room(openmp.threads())

    def _make_room(self, threads: int) -> None:
        self.threads = threads
        tile = self._tile_rows * self.group
        self._scores = np.empty(threads * tile * self._longest, np.float32)
        self._sums = np.empty((threads, tile, self.pool.shape.value_width), np.float32)
        self._spans = np.empty((threads, self._tile_rows, 2), np.int64)

    def twin(self) -> CompiledAttention:
        """Return attention to the same pool on one thread, which may run beside this one."""
        twin = copy(self)
        twin._make_room(1)  # noqa: SLF001  # its own class
        return twin

    def lay_out(self, spans: Sequence[Span]) -> Pages:
        return lay_out(spans, self._tile_rows)

    def queries(self, rows: int) -> Floats:
        """Return room for scaled queries: float32 [kv_heads, rows, group, key_dim]."""
        shape = self.pool.shape
        return np.empty((shape.kv_heads, rows, self.group, shape.key_dim), np.float32)

    def store_attend(
        self, pages: Pages, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape
    ) -> Tensor:
        kept, rows = self.pool.shape, pages.rows
        queries = self.queries(rows)
        out = query.new_zeros(len(query), query.shape[1], kept.value_dim)
        self._kernels.store(
            *(as_array(part[:rows].contiguous()) for part in (query, key, value)),
            np.float32(shape.scale),
            pages.places,
            queries,
            *self.layers[layer],
        )
        self.attend(pages, layer, queries, as_array(out), shape)
        return out

    def attend(self, pages: Pages, layer: int, queries: Floats, out: Stored, shape: Shape) -> None:
        """Write attention of `queries` into `out`, at least pages.rows * heads * value_dim stored numbers."""
        kept = self.pool.shape
        tasks = len(pages.tiles) * kept.kv_heads
        threads = openmp.worth(self.threads, pages.work * kept.kv_heads * self.group * _KEY_NS)
        room = (self.threads, self._tile_rows * self.group, _width(pages.longest))
        scores = self._scores[: math.prod(room)].reshape(room)
        self._kernels.attend(
            threads, tasks, queries, *self.layers[layer], pages.tables, pages.tiles, pages.paths,
            shape.window or 0, np.float32(shape.softcap or 0.0), scores, self._sums, self._spans,
            out.reshape(-1, kept.kv_heads, self.group, kept.value_dim),
        )  # fmt: skip


def _width(keys: int) -> int:
    """Return the scores a query head needs: whole blocks, one more for a window that begins within one."""
    return (-(-keys // BLOCK_TOKENS) + 1) * BLOCK_TOKENS


class TorchAttention:
    """Plain torch operations, for devices and dtypes without a kernel here; not tested on CUDA.

    Gathers each sequence's blocks. Bits may depend on how many rows a sequence has in the step.
    """

    def __init__(self, pool: KvPool, heads: int) -> None:
        self.pool = pool
        self._group = heads // pool.shape.kv_heads

    def lay_out(self, spans: Sequence[Span]) -> Pages:
        return lay_out(spans, tile_rows(self._group))

    def store_attend(
        self, pages: Pages, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape
    ) -> Tensor:
        rows, width = pages.rows, self.pool.shape.value_dim
        blocks, slots = torch.from_numpy(pages.places).to(query.device).unbind(1)
        self.pool.keys[layer][blocks, :, :, slots] = key[:rows]
        self.pool.values[layer][blocks, :, slots, :width] = value[:rows]
        out = query.new_zeros(len(query), query.shape[1], width)
        row = 0
        for span in pages.spans:
            mine = slice(row, row + span.rows)
            out[mine] = self._of_span(span, layer, query[mine], shape)
            row += span.rows
        return out

    def _of_span(self, span: Span, layer: int, query: Tensor, shape: Shape) -> Tensor:
        keys, values = self._gathered(span, layer)
        rows, heads, dim = query.shape
        grouped = query.view(rows, -1, self._group, dim).permute(1, 2, 0, 3)
        scores = torch.matmul(grouped.float() * shape.scale, keys[:, None].float())
        if shape.softcap is not None:  # Gemma 2 (arXiv 2408.00118, section 2)
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        unseen = _unseen(span, shape.window).to(query.device)
        weights = torch.softmax(scores.masked_fill(unseen, -torch.inf), dim=-1)
        mixed = torch.matmul(weights, values[:, None].float())
        return mixed.permute(2, 0, 1, 3).reshape(rows, heads, -1).to(query.dtype)

    def _gathered(self, span: Span, layer: int) -> tuple[Tensor, Tensor]:
        """Return a sequence's keys [kv_heads, key_dim, end] and values [kv_heads, end, value_dim]."""
        kept = self.pool.shape
        count = -(-span.end // BLOCK_TOKENS)
        blocks = torch.tensor(list(span.blocks[:count]), device=self.pool.keys.device)
        keys = self.pool.keys[layer][blocks].permute(1, 2, 0, 3).reshape(kept.kv_heads, kept.key_dim, -1)
        values = self.pool.values[layer][blocks].transpose(0, 1).reshape(kept.kv_heads, -1, kept.value_width)
        return keys[..., : span.end], values[:, : span.end, : kept.value_dim]


def _unseen(span: Span, window: int | None) -> Tensor:
    """Return a mask [rows, end] of the slots that each row does not see."""
    positions = torch.arange(span.end)
    if span.parents:
        positions[span.root :] = span.root + torch.tensor(depths(span.parents, len(span.parents)))
    own = positions[span.start :, None]
    unseen = positions > own
    if span.parents:
        nodes = torch.from_numpy(~lineage(span.parents))
        first = max(span.start, span.root)
        unseen[: first - span.start, span.root :] = True
        unseen[first - span.start :, span.root :] = nodes[first - span.root :]
    if window is not None:
        unseen |= positions <= own - window
    return unseen

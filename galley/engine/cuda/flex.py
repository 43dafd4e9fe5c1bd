"""Attention over pages where they lie, by torch's FlexAttention (Dong et al., arXiv 2412.05496): for CUDA.

One call a layer for all rows of all sequences. The pool is one long row of positions a head; a block mask
names, for each tile of queries, the blocks of its sequence. Nothing is gathered but the queries.

Untested on a GPU, for none could be had: only on the CPU, with torch's own operator not compiled, and with a
stand-in for its kernel (tests/integration/galley/engine/test_flex.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from galley.common.logs import get_logger
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.engine.cuda import flex_layout
from galley.engine.cuda.flat_pool import FlatPool
from galley.engine.cuda.flex_layout import Inputs, PassShape
from galley.engine.cuda.transfer import host_buffer
from galley.engine.kv_pool import KvShape
from galley.engine.pages import Pages, Shape, Span, lay_out

Operator = Callable[..., Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor], Tensor, Tensor, "Kind"], Tensor]

_LOG = get_logger(__name__)
# torch's types of it are older than its arguments.
_COMPILE: Any = torch.compile
# A logical block that no query comes to; times BLOCK_TOKENS it is still an int32.
_FAR = 2**25
# More kinds of masks, scores and shapes than a model has; beyond them torch raises.
_COMPILED = 64
_LEAST_DIM = 16  # of a product of tensor cores
_CAPABLE = (8, 0)  # whose tensor cores multiply bfloat16


def serves(device: torch.device, shape: KvShape) -> bool:
    """Can FlexAttention be compiled for this CUDA device and these heads? It is tried: that takes seconds."""
    if min(shape.key_dim, shape.value_dim) < _LEAST_DIM or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _CAPABLE and works(device, shape)


@torch.inference_mode()
def works(device: torch.device, shape: KvShape) -> bool:
    """Does torch compile and run it for one row of such heads? Why it does not is logged."""
    heads = shape.kv_heads
    pool = FlatPool(replace(shape, layers=1), 1, device)
    key, value = (
        torch.zeros(1, heads, dim, dtype=shape.dtype, device=device)
        for dim in (shape.key_dim, shape.value_dim)
    )
    try:
        attention = FlexAttention(pool, heads)
        pages = attention.lay_out([Span(0, 1, [0])])
        attention.store_attend(pages, 0, key, key, value, Shape(shape.key_dim**-0.5))
    except RuntimeError as error:  # of torch's compiler too
        _LOG.warning("FlexAttention cannot be compiled, plain torch attends", error=str(error))
        return False
    return True


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kernel is compiled for: how a layer attends, and the tiles (slots, keys) that it works in.

    `options`: the tiles are the kernel's own as well, for torch's choice of them would go by the pass.
    """

    scale: float
    window: int | None
    softcap: float | None
    slots: int
    options: bool


def attend_by(  # noqa: PLR0913, PLR0917  # a kernel takes tensors, not objects
    operator: Operator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: tuple[Tensor, Tensor, Tensor],
    queries: Tensor,
    logical: Tensor,
    kind: Kind,
) -> Tensor:
    """[1, kv_heads, slots, value_dim] of query [1, kv_heads, slots, key_dim]; key and value are the pool's.

    `tiles`: firsts, counts and tables of `Inputs`. `operator` is `flex_attention`, or does the same.
    """
    firsts, counts, tables = tiles
    if kind.window is not None:
        counts, tables = _within(firsts, counts, tables, kind.window)
    mask = BlockMask.from_kv_blocks(
        counts[None, None],
        tables[None, None],
        BLOCK_SIZE=(kind.slots, BLOCK_TOKENS),
        mask_mod=_seen(queries, logical, kind.window),
        seq_lengths=(query.shape[2], key.shape[2]),
        compute_q_blocks=False,
    )
    return operator(
        query,
        key,
        value,
        score_mod=None if kind.softcap is None else _capped(kind.softcap),
        block_mask=mask,
        scale=kind.scale,
        kernel_options=_options(kind.slots) if kind.options else None,
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: tuple[Tensor, Tensor, Tensor],
    queries: Tensor,
    logical: Tensor,
    kind: Kind,
) -> Tensor:
    return attend_by(flex_attention, query, key, value, tiles, queries, logical, kind)


@cache
def compiled_flex(backend: str | Callable[..., Any] = "inductor") -> Attend:
    """`attend_by` torch's `flex_attention`, compiled for each `Kind`; uncompiled it would make every score.

    Lengths that are not the pool's are dynamic, as they are marked; a scale or window must not become so,
    for the kernel is written for it.
    """
    compiled: Attend = _COMPILE(
        _attend, fullgraph=True, dynamic=False, recompile_limit=_COMPILED, backend=backend
    )

    def marked(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tiles: tuple[Tensor, Tensor, Tensor],
        queries: Tensor,
        logical: Tensor,
        kind: Kind,
    ) -> Tensor:
        maybe_mark_dynamic(query, 2)
        maybe_mark_dynamic(tiles[-1], 1)
        for part in (*tiles, queries):
            maybe_mark_dynamic(part, 0)
        return compiled(query, key, value, tiles, queries, logical, kind)

    return marked


@dataclass(frozen=True, slots=True)
class Placed:
    """A pass on the device. `logical`: which block of its sequence each block of the pool is, or _FAR."""

    shape: PassShape
    inputs: Inputs[Tensor]
    places: Tensor  # int64 [rows]
    logical: Tensor  # int32 [blocks + 1]


@dataclass(frozen=True, slots=True)
class PlacedPages(Pages):
    """Pages whose pass is on the device already."""

    placed: Placed


class FlexAttention:
    """One call a layer; `fixed`: tiles of one size, so that a row's bits are the same in any pass.

    `attend` is that of `compiled_flex`, or does the same.
    """

    def __init__(
        self, pool: FlatPool, heads: int, *, fixed: bool = False, attend: Attend | None = None
    ) -> None:
        self.pool = pool
        self.group = heads // pool.shape.kv_heads
        self.fixed = fixed
        self._attend = attend or compiled_flex()
        self._device = pool.keys.device

    def lay_out(self, spans: Sequence[Span]) -> Pages:
        """See `Attention`."""
        return lay_out(spans, self.slots(spans) // self.group)

    def slots(self, spans: Sequence[Span]) -> int:
        """Slots of a tile of a pass over these spans."""
        return flex_layout.slots_of(self.group, max(span.rows for span in spans), fixed=self.fixed)

    def pack(self, shape: PassShape, pages: Pages, tokens: Sequence[int], wanted: Sequence[int]) -> Tensor:
        """The pass as one buffer on the host."""
        buffer = host_buffer(flex_layout.numbers(shape, self.group), torch.int32, self._device)
        flex_layout.fill(buffer, shape, self.group, pages, tokens, wanted, self.pool.scratch)
        return buffer

    def place(self, shape: PassShape, buffer: Tensor) -> Placed:
        """The pass of a buffer that is on the device; no work of the host depends on its numbers."""
        inputs = flex_layout.sections(buffer, shape, self.group)
        logical = torch.full((self.pool.blocks + 1,), _FAR, dtype=torch.int32, device=self._device)
        own = torch.arange(shape.width, dtype=torch.int32, device=self._device).repeat(shape.tiles)
        logical[inputs.tables.flatten().long()] = own
        logical[self.pool.scratch] = _FAR
        return Placed(shape, inputs, inputs.places.long(), logical)

    def store_attend(
        self, pages: Pages, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape
    ) -> Tensor:
        """See `Attention`; rows that only fill up come to the scratch block."""
        placed = pages.placed if isinstance(pages, PlacedPages) else self._placed(pages, len(query))
        self._store(placed, layer, key, value)
        rows, heads, dim = query.shape
        kv_heads, group = heads // self.group, self.group
        by_head = query.view(rows, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, rows * group, dim)
        inputs = placed.inputs
        mixed = self._attend(
            by_head.index_select(1, inputs.sources)[None],
            self.pool.keys_of(layer)[None],
            self.pool.values_of(layer)[None],
            (inputs.firsts, inputs.counts, inputs.tables),
            inputs.queries,
            placed.logical,
            Kind(shape.scale, shape.window, shape.softcap, placed.shape.slots, self._device.type == "cuda"),
        )[0]
        back = mixed.index_select(1, inputs.slots).view(kv_heads, rows, group, -1)
        return back.transpose(0, 1).reshape(rows, heads, -1)

    def _placed(self, pages: Pages, rows: int) -> Placed:
        exact = flex_layout.exact(pages, 0, self.slots(pages.spans))
        shape = flex_layout.PassShape(rows, 0, exact.tiles, exact.slots, exact.width)
        buffer = self.pack(shape, pages, [0] * pages.rows, ())
        return self.place(shape, buffer.to(self._device, non_blocking=True))

    def _store(self, placed: Placed, layer: int, key: Tensor, value: Tensor) -> None:
        """Put new keys and values into their blocks.

        Values are made finite, for a value that is masked, or that a later owner of the block never wrote,
        is still multiplied by 0. That a row was not finite is kept in its keys: whoever sees it says NaN.
        """
        bad = ~value.isfinite().all(-1, keepdim=True)
        key = key.masked_fill(bad, torch.nan)
        value = value.masked_fill(bad, 0)
        self.pool.keys_of(layer).index_copy_(1, placed.places, key.transpose(0, 1))
        self.pool.values_of(layer).index_copy_(1, placed.places, value.transpose(0, 1))


def _options(slots: int) -> dict[str, Any]:
    return {"BLOCK_M": slots, "BLOCK_N": BLOCK_TOKENS, "num_warps": 4, "FORCE_USE_FLEX_ATTENTION": True}


def _within(firsts: Tensor, counts: Tensor, tables: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Counts and tables without the blocks that a tile's first row has left behind."""
    left = ((firsts - window + 1).clamp(min=0) // BLOCK_TOKENS).minimum(counts)
    entries = torch.arange(tables.shape[1], device=left.device)
    shifted = (entries + left[:, None]).clamp(max=tables.shape[1] - 1)  # [tiles, width]
    return counts - left, tables.gather(1, shifted)


def _seen(queries: Tensor, logical: Tensor, window: int | None) -> Callable[..., Tensor]:
    """The mask: a block's position in its sequence is the same in all that share it."""

    def before(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _position(logical, key) <= queries[query]

    if window is None:
        return before

    def within(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = _position(logical, key)
        return (position <= queries[query]) & (position > queries[query] - window)

    return within


def _position(logical: Tensor, key: Tensor) -> Tensor:
    """In its sequence, of a slot of the pool."""
    return logical[key // BLOCK_TOKENS] * BLOCK_TOKENS + key % BLOCK_TOKENS


def _capped(softcap: float) -> Callable[..., Tensor]:
    """Gemma 2 (arXiv 2408.00118, section 2)."""

    def cap(score: Tensor, *_where: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return cap

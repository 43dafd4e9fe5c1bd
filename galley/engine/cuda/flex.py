"""Attention over pages in place, by torch's FlexAttention (Dong et al., arXiv 2412.05496): for CUDA.

One call per layer serves all rows of all sequences. The pool is one row of positions per head; a block mask
names, for each tile of queries, the blocks of its sequence. Only the queries are gathered.

It has never run on a GPU; test_flex.py runs torch's operator uncompiled, and a stand-in for its kernel.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo import maybe_mark_dynamic
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from galley.common.logs import get_logger
from galley.core.kv.blocks import BLOCK_TOKENS
from galley.engine.cuda import flex_layout
from galley.engine.cuda.device import host_buffer
from galley.engine.cuda.flex_layout import Inputs, StepShape
from galley.engine.pages import FlatPool, KvShape, Pages, Shape, Span, lay_out

Operator = Callable[..., Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor], "Sight", "Kind"], Tensor]

_LOG = get_logger(__name__)
# torch's types lack some of its arguments.
_COMPILE: Any = torch.compile
# A logical block beyond all queries; times BLOCK_TOKENS it is still an int32.
_FAR = 2**25
# More kinds of masks, scores and shapes than a model has; torch raises beyond it.
_MAX_COMPILED = 64
_MIN_DIM = 16  # of a product on tensor cores
_MIN_CAPABILITY = (8, 0)  # tensor cores that multiply bfloat16


def can_serve(device: torch.device, shape: KvShape) -> bool:
    """Return True if FlexAttention compiles for these heads on this CUDA device; trying takes seconds."""
    if min(shape.key_dim, shape.value_dim) < _MIN_DIM or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY and can_compile(device, shape)


@torch.inference_mode()
def can_compile(device: torch.device, shape: KvShape) -> bool:
    """Return True if FlexAttention compiles and runs for one row of such heads; log the error if not."""
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
    except RuntimeError as error:  # torch's compiler raises it too
        _LOG.warning("FlexAttention not compiled; using plain torch", error=str(error))
        return False
    return True


@dataclass(frozen=True, slots=True)
class Kind:
    """The parameters that a kernel is compiled for: how a layer attends, and `slots` queries a tile.

    `options`: fix the kernel's own tiles too, since torch's choice of them would depend on the step.
    """

    scale: float
    window: int | None
    softcap: float | None
    slots: int
    options: bool


class Trees(NamedTuple):
    """The trees of a step, as in `Inputs`; `row_of`: int32 [blocks + 1], where a block's numbers begin."""

    entered: Tensor
    row_of: Tensor
    enter: Tensor
    leave: Tensor
    ahead: Tensor


class Sight(NamedTuple):
    """The numbers that decide which keys a query sees."""

    queries: Tensor  # positions
    logical: Tensor  # int32 [blocks + 1]: the index of each pool block in its sequence, or _FAR
    trees: Trees | None = None


def attend_by(  # a kernel takes tensors, not objects
    operator: Operator,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: tuple[Tensor, Tensor, Tensor],
    sight: Sight,
    kind: Kind,
) -> Tensor:
    """Return [1, kv_heads, slots, value_dim]: attention of query [1, kv_heads, slots, key_dim] to the pool.

    `tiles`: firsts, counts and tables of `Inputs`. `operator` is `flex_attention`, or does the same.
    """
    firsts, counts, tables = tiles
    if kind.window is not None:
        counts, tables = _within(firsts, counts, tables, kind.window)
    mask = BlockMask.from_kv_blocks(
        counts[None, None],
        tables[None, None],
        BLOCK_SIZE=(kind.slots, BLOCK_TOKENS),
        mask_mod=_seen(sight, kind.window),
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
    sight: Sight,
    kind: Kind,
) -> Tensor:
    return attend_by(flex_attention, query, key, value, tiles, sight, kind)


@cache
def compiled_flex(backend: str | Callable[..., Any] = "inductor") -> Attend:
    """Return `attend_by` with torch's `flex_attention`, compiled for each `Kind`.

    Uncompiled it would store every score. A scale or window must not become dynamic, since the kernel is
    written for it.
    """
    compiled: Attend = _COMPILE(
        _attend, fullgraph=True, dynamic=False, recompile_limit=_MAX_COMPILED, backend=backend
    )

    def marked(*arguments: Any) -> Tensor:
        query, _key, _value, tiles, sight, _kind = arguments
        maybe_mark_dynamic(query, 2)
        maybe_mark_dynamic(tiles[-1], 1)
        trees = sight.trees
        nodes = () if trees is None else (trees.entered, trees.enter, trees.leave, trees.ahead)
        for part in (*tiles, sight.queries, *nodes):
            maybe_mark_dynamic(part, 0)
        return compiled(*arguments)

    return marked


@dataclass(frozen=True, slots=True)
class Placed:
    """A step on the device."""

    shape: StepShape
    inputs: Inputs[Tensor]
    places: Tensor  # int64 [rows]
    sight: Sight


class FlexAttention:
    """Attention in one call a layer; `fixed` tiles of one size give a row the same bits in any step."""

    def __init__(
        self, pool: FlatPool, heads: int, *, fixed: bool = False, attend: Attend | None = None
    ) -> None:
        self.pool = pool
        self.group = heads // pool.shape.kv_heads
        self.fixed = fixed
        self._attend = attend or compiled_flex()
        self._device = pool.keys.device

    def lay_out(self, spans: Sequence[Span]) -> Pages:
        return lay_out(spans, self.slots(spans) // self.group)

    def slots(self, spans: Sequence[Span]) -> int:
        return flex_layout.slots_of(self.group, max(span.rows for span in spans), fixed=self.fixed)

    def pack(
        self, shape: StepShape, pages: Pages, tokens: Sequence[int], logit_rows: Sequence[int]
    ) -> Tensor:
        buffer = host_buffer(flex_layout.numbers(shape, self.group), torch.int32, self._device)
        flex_layout.fill(buffer, shape, self.group, pages, tokens, logit_rows, self.pool.scratch)
        return buffer

    def place(self, shape: StepShape, buffer: Tensor) -> Placed:
        """Return the step of a buffer that is on the device, without waiting for its numbers."""
        inputs = flex_layout.sections(buffer, shape, self.group)
        logical = torch.full((self.pool.blocks + 1,), _FAR, dtype=torch.int32, device=self._device)
        own = torch.arange(shape.width, dtype=torch.int32, device=self._device).repeat(shape.tiles)
        logical[inputs.tables.flatten().long()] = own
        logical[self.pool.scratch] = _FAR
        sight = Sight(inputs.queries, logical, self._trees(inputs) if shape.trees else None)
        return Placed(shape, inputs, inputs.places.long(), sight)

    def _trees(self, inputs: Inputs[Tensor]) -> Trees:
        row_of = torch.zeros(self.pool.blocks + 1, dtype=torch.int32, device=self._device)
        first, last = BLOCK_TOKENS, len(inputs.enter)
        row_of[inputs.tree_blocks.long()] = torch.arange(
            first, last, BLOCK_TOKENS, dtype=torch.int32, device=self._device
        )
        return Trees(inputs.entered, row_of, inputs.enter, inputs.leave, inputs.ahead)

    def store_attend(
        self, pages: Pages | Placed, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape
    ) -> Tensor:
        """Write keys and values into the pool, then attend; padding rows go to the scratch block."""
        placed = pages if isinstance(pages, Placed) else self._placed(pages, len(query))
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
            placed.sight,
            Kind(shape.scale, shape.window, shape.softcap, placed.shape.slots, self._device.type == "cuda"),
        )[0]
        back = mixed.index_select(1, inputs.slots).view(kv_heads, rows, group, -1)
        return back.transpose(0, 1).reshape(rows, heads, -1)

    def _placed(self, pages: Pages, rows: int) -> Placed:
        exact = flex_layout.exact(pages, 0, self.slots(pages.spans))
        shape = replace(exact, rows=rows)
        buffer = self.pack(shape, pages, [0] * pages.rows, ())
        return self.place(shape, buffer.to(self._device, non_blocking=True))

    def _store(self, placed: Placed, layer: int, key: Tensor, value: Tensor) -> None:
        """Write new keys and values into their blocks.

        Values are made finite: a masked value, or one that was never written, is still multiplied by 0. A row
        that was not finite gets NaN keys, so whoever attends to it gets NaN.
        """
        bad = ~value.isfinite().all(-1, keepdim=True)
        key = key.masked_fill(bad, torch.nan)
        value = value.masked_fill(bad, 0)
        self.pool.keys_of(layer).index_copy_(1, placed.places, key.transpose(0, 1))
        self.pool.values_of(layer).index_copy_(1, placed.places, value.transpose(0, 1))


def _options(slots: int) -> dict[str, Any]:
    return {"BLOCK_M": slots, "BLOCK_N": BLOCK_TOKENS, "num_warps": 4, "FORCE_USE_FLEX_ATTENTION": True}


def _within(firsts: Tensor, counts: Tensor, tables: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Return counts and tables without the blocks that a tile's first row no longer sees."""
    left = ((firsts - window + 1).clamp(min=0) // BLOCK_TOKENS).minimum(counts)
    entries = torch.arange(tables.shape[1], device=left.device)
    shifted = (entries + left[:, None]).clamp(max=tables.shape[1] - 1)  # [tiles, width]
    return counts - left, tables.gather(1, shifted)


def _seen(sight: Sight, window: int | None) -> Callable[..., Tensor]:
    """Return the mask; a block has the same position in all sequences that share it."""
    queries, logical, trees = sight

    def before(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _position(logical, key) <= queries[query]

    def within(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = _position(logical, key)
        return (position <= queries[query]) & (position > queries[query] - (window or 0))

    if trees is None:
        return before if window is None else within
    entered, row_of, enter, leave, ahead = trees

    def related(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = row_of[key // BLOCK_TOKENS] + key % BLOCK_TOKENS
        position = _position(logical, key) - ahead[at]
        seen = (position <= queries[query]) & (enter[at] <= entered[query]) & (entered[query] < leave[at])
        return seen if window is None else seen & (position > queries[query] - window)

    return related


def _position(logical: Tensor, key: Tensor) -> Tensor:
    return logical[key // BLOCK_TOKENS] * BLOCK_TOKENS + key % BLOCK_TOKENS


def _capped(softcap: float) -> Callable[..., Tensor]:
    """Return the cap of scores of Gemma 2 (arXiv 2408.00118, section 2)."""

    def cap(score: Tensor, *_where: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap

    return cap

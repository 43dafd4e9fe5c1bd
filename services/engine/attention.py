"""Ragged attention for transformers' own modelling code: all rows of a batch in one pass, KV per session.

The rows of all sessions lie one after another in one row of the batch, so every linear layer runs once for
all. Here, and only here, they part: each session's queries meet its own keys, on the grid of `tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.engine.errors import UnsupportedModel
from services.engine.tiles import TILE, Grid, Run, lay_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from services.engine.cache import LayerKV, SessionCache

# No mask function is registered under this name, so that transformers makes no masks.
NAME = "galley"
_UNSERVED = ("position_bias", "s_aux", "block_sequence_ids")


def register() -> None:
    """Make `attn_implementation="galley"` known to transformers; again is harmless."""
    AttentionInterface.register(NAME, ragged_attention)


@dataclass(frozen=True, slots=True)
class Span:
    """`rows` new tokens of one session, from position `start`."""

    cache: SessionCache
    start: int
    rows: int


class BatchPlan:
    """What one forward pass is about; it travels to the attention function as a keyword argument.

    `padded_rows` >= the rows of all spans: rows beyond them belong to nobody and only fill up the pass.
    """

    def __init__(self, spans: Sequence[Span], padded_rows: int, device: torch.device) -> None:
        self.spans = tuple(spans)
        self.rows = sum(span.rows for span in spans)
        self.grid: Grid = lay_out([(span.start, span.rows) for span in spans])
        filler = (0,) * (padded_rows - self.rows)
        self.tiles = torch.tensor(self.grid.tiles + filler, device=device)
        self.slots = torch.tensor(self.grid.slots + filler, device=device)
        self.layers_seen: set[int] = set()
        self._masks: dict[tuple[int | None, int, torch.dtype], list[Tensor]] = {}

    def masks(self, window: int | None, group: int, dtype: torch.dtype) -> list[Tensor]:
        """For each run, 0 or -inf to be added to its scores: [tiles, 1, group * TILE, keys]."""
        key = (window, group, dtype)
        if key not in self._masks:
            device = self.tiles.device
            self._masks[key] = [_mask(run, window, group, dtype, device) for run in self.grid.runs]
        return self._masks[key]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> list[LayerKV]:
        """Put the new rows' keys and values, [kv_heads, rows, head_dim], into each session's cache."""
        self.layers_seen.add(layer)
        held = []
        row = 0
        for span in self.spans:
            part = slice(row, row + span.rows)
            kv = span.cache.layer(layer, keys, values)
            kv.write(span.start, keys[:, part], values[:, part])
            held.append(kv)
            row += span.rows
        return held


def _mask(run: Run, window: int | None, group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    tiles = run.last_tile - run.first_tile
    queries = torch.arange(run.position, run.position + tiles * TILE, device=device)[:, None]
    keys = torch.arange(run.keys, device=device)
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
    return mask.view(tiles, 1, TILE, run.keys).repeat(1, 1, group, 1)


def ragged_attention(  # noqa: PLR0913, PLR0917  # the signature is transformers'
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001  # the plan knows better
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    galley_plan: BatchPlan | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [1, heads, rows, head_dim] to each session's keys; [1, rows, heads, head_dim].

    `key` and `value` [1, kv_heads, rows, head_dim] are put into the sessions' caches first. Raises
    UnsupportedModel where the model wants something that is not served here.
    """
    plan = _checked(module, sliding_window, galley_plan, others)
    heads, kv_heads = query.shape[1], key.shape[1]
    held = plan.write(int(module.layer_idx), key[0], value[0])  # type: ignore[arg-type]  # transformers sets an int
    tiled = _to_tiles(query[0], plan, kv_heads)  # [tiles, kv_heads, group * TILE, head_dim]
    masks = plan.masks(sliding_window, heads // kv_heads, query.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = [
        _attend(tiled[run.first_tile : run.last_tile], held[run.span], mask, scale, softcap)
        for run, mask in zip(plan.grid.runs, masks, strict=True)
    ]
    return _from_tiles(torch.cat(parts), plan, heads), None


def _checked(
    module: torch.nn.Module, window: int | None, plan: BatchPlan | None, others: dict[str, Any]
) -> BatchPlan:
    name = type(module).__name__
    if plan is None:
        raise UnsupportedModel(f"{name}: does not hand its arguments on to the attention function")
    wanted = [other for other in _UNSERVED if others.get(other) is not None]
    if wanted:
        raise UnsupportedModel(f"{name}: needs {wanted[0]} in attention")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"{name}: attends to the future")
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    if window is None and layer_types and layer_types[module.layer_idx] == "sliding_attention":
        raise UnsupportedModel(f"{name}: does not tell the attention function its sliding window")
    return plan


def _to_tiles(query: Tensor, plan: BatchPlan, kv_heads: int) -> Tensor:
    """[heads, rows, head_dim] to [tiles, kv_heads, group * TILE, head_dim]: heads of one group are rows."""
    heads, _, head_dim = query.shape
    group = heads // kv_heads
    tiled = query.new_zeros(plan.grid.tile_count, kv_heads, group, TILE, head_dim)
    rows = query[:, : plan.rows].transpose(0, 1).reshape(plan.rows, kv_heads, group, head_dim)
    tiled[plan.tiles[: plan.rows], :, :, plan.slots[: plan.rows]] = rows
    return tiled.view(plan.grid.tile_count, kv_heads, group * TILE, head_dim)


def _from_tiles(tiled: Tensor, plan: BatchPlan, heads: int) -> Tensor:
    """The inverse: [1, rows, heads, head_dim]."""
    tiles, kv_heads, _, head_dim = tiled.shape
    rows = tiled.view(tiles, kv_heads, heads // kv_heads, TILE, head_dim)[plan.tiles, :, :, plan.slots]
    return rows.reshape(1, -1, heads, head_dim)


def _attend(query: Tensor, held: LayerKV, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[tiles, kv_heads, group * TILE, head_dim] of values; every product's shape is the grid's."""
    length = mask.shape[-1]
    keys, values = held.keys[None, :, :length], held.values[None, :, :length]
    if softcap is not None:
        return torch.cat(
            [
                _attend_capped(query[i : i + 1], keys, values, mask[i : i + 1], scale, softcap)
                for i in range(len(query))
            ]
        )
    return scaled_dot_product_attention(
        query, keys.expand(len(query), -1, -1, -1), values.expand(len(query), -1, -1, -1), mask, scale=scale
    )


def _attend_capped(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float
) -> Tensor:
    # The fused kernel cannot cap scores (Gemma 2, arXiv 2408.00118, section 2).
    scores = torch.matmul(query, keys.transpose(-1, -2)).float() * scale
    scores = torch.tanh(scores / softcap) * softcap + mask
    return torch.matmul(torch.softmax(scores, dim=-1).to(values.dtype), values)

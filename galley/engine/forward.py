"""The two forward passes of a model: transformers' modelling code, or our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from galley.engine.attention import run_module
from galley.engine.cpu import llama, packing
from galley.engine.cuda.flex import FlexAttention
from galley.engine.cuda.forward import ROWS, DeviceForward, Shapes
from galley.engine.cuda.graphs import CudaRecorder, Graphs
from galley.engine.cuda.options import FIXED_ROWS, DeviceOptions
from galley.engine.kv_pool import KvPool
from galley.engine.paged import Attention, CompiledAttention, attention_for
from galley.engine.pages import Pages
from galley.engine.parallel.ranks import Ranks


class Forward(Protocol):
    """A model's layers and head; `kind` and `attention` name the code that computes them."""

    @property
    def kind(self) -> str:
        """Return whose code runs the layers: "own" or "transformers"."""

    @property
    def attention(self) -> Attention: ...

    def __call__(self, pages: Pages, tokens: Sequence[int], logit_rows: Sequence[int]) -> Tensor:
        """Feed the rows of `pages`; return float32 logits [logit_rows, vocab_size] of those rows."""


def forward_of(
    module: Any,
    pool: KvPool,
    ranks: Ranks,
    *,
    max_rows: int,
    own: bool,
    options: DeviceOptions,
) -> Forward:
    """Return the forward pass of `module`: transformers' code, or `own` where `llama.serves` it.

    Both take the module apart or change it; the caller must not use it afterwards.
    """
    heads, device = module.config.num_attention_heads // ranks.size, pool.keys.device
    context = module.config.max_position_embeddings
    attention = attention_for(pool, heads, device, context, fixed=options.invariant)
    if own and isinstance(attention, CompiledAttention):
        return llama.LlamaForward(module, attention, ranks, max_rows)
    if isinstance(attention, FlexAttention):
        return _on_device(module, attention, ranks, options)
    packing.pack_linears(module, packing.Linears(module.dtype, str(device)))
    return TransformersForward(module, attention)


def _on_device(module: Any, attention: FlexAttention, ranks: Ranks, options: DeviceOptions) -> Forward:
    device = attention.pool.keys.device
    # A recording cannot hold the exchanges between ranks.
    recorded = options.graphs and ranks.size == 1 and device.type == "cuda"
    graphs = Graphs(CudaRecorder(device), device) if recorded else None
    shapes = Shapes(fixed=FIXED_ROWS) if options.invariant else Shapes(ROWS)
    return DeviceForward(module, attention, shapes, graphs)


class TransformersForward:
    kind = "transformers"

    def __init__(self, module: Any, attention: Attention) -> None:
        self.attention = attention
        self._module = module
        self._device = attention.pool.keys.device

    def __call__(self, pages: Pages, tokens: Sequence[int], logit_rows: Sequence[int]) -> Tensor:
        rows = self._padded(tokens)[None], self._padded(pages.positions.tolist())[None]
        kept = self._padded(logit_rows) if logit_rows else torch.empty(0)
        return run_module(self._module, self.attention, pages, *rows, kept)[: len(logit_rows)]

    def _padded(self, values: Sequence[int]) -> Tensor:
        """Return the values on the device, with as many as a product has rows at least."""
        filler = [0] * (packing.MIN_ROWS - len(values))
        return torch.tensor([*values, *filler], dtype=torch.long, device=self._device)

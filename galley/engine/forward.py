"""The two forward passes of a model: transformers' modelling code, or our own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from galley.engine.attention import run_module
from galley.engine.cpu import llama, packing
from galley.engine.cpu.threaded import threaded
from galley.engine.cuda import flex_layout
from galley.engine.cuda.device import FIXED_ROWS, DeviceOptions
from galley.engine.cuda.flex import FlexAttention
from galley.engine.cuda.flex_layout import StepShape
from galley.engine.cuda.graphs import CudaRecorder, Graphs
from galley.engine.paged import Attention, CompiledAttention, attention_for
from galley.engine.pages import KvPool, Pages, Span
from galley.engine.parallel.ranks import Ranks
from galley.engine.states import UNTOUCHED, Residuals


class Forward(Protocol):
    """A model's layers, its attention over pages, and its head."""

    @property
    def kind(self) -> str:
        """Return whose code runs the layers: "own" or "transformers"."""

    @property
    def attention(self) -> Attention: ...

    def __call__(
        self,
        spans: Sequence[Span],
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        residuals: Residuals = UNTOUCHED,
    ) -> Tensor:
        """Feed the rows of all spans; return float32 logits [logit_rows, tokens of the head].

        Adds to the embeddings what `residuals` has, and reads the states there that it wants.
        """


def forward_of(
    module: Any,
    pool: KvPool,
    ranks: Ranks,
    *,
    max_rows: int,
    own: bool,
    options: DeviceOptions,
) -> Forward:
    """Return the forward pass of `module`: transformers' code, or with `own` that of `LlamaForward`.

    `own` takes the module apart: the caller cannot use it afterwards. Otherwise its layers may be packed.
    """
    heads, device = module.config.num_attention_heads // ranks.size, pool.keys.device
    context = module.config.max_position_embeddings
    attention = attention_for(pool, heads, device, context, fixed=options.invariant)
    if own and isinstance(attention, CompiledAttention):
        return threaded(llama.LlamaForward(module, attention, ranks, max_rows), ranks)
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

    def __call__(
        self,
        spans: Sequence[Span],
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        residuals: Residuals = UNTOUCHED,
    ) -> Tensor:
        pages = self.attention.lay_out(spans)
        rows = self._padded(tokens)[None], self._padded(pages.positions.tolist())[None]
        kept = self._padded(logit_rows) if logit_rows else torch.empty(0)
        return run_module(self._module, self.attention, pages, *rows, kept, residuals)[: len(logit_rows)]

    def _padded(self, values: Sequence[int]) -> Tensor:
        """Return the values on the device, padded with zeros to the fewest rows that a product computes."""
        filler = [0] * (packing.MIN_ROWS - len(values))
        return torch.tensor([*values, *filler], dtype=torch.long, device=self._device)


ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that steps are padded to: `rows` of the list, or always `fixed` rows."""

    rows: tuple[int, ...] = ROWS
    fixed: int | None = None

    def of(self, pages: Pages, logit_rows: int, slots: int) -> StepShape | None:
        """Return the smallest shape for the step, None if there is none. Raises ValueError beyond `fixed`."""
        own = flex_layout.exact(pages, logit_rows, slots)
        if self.fixed is not None:
            return self._fixed(own, self.fixed)
        rows = _padded(own.rows, self.rows)
        if rows is None:
            return None
        filled = _padded(logit_rows, (0, *self.rows))
        return replace(own, rows=rows, logit_rows=filled or 0, tiles=_power(own.tiles))

    def _fixed(self, own: StepShape, rows: int) -> StepShape:
        if own.rows > rows:
            raise ValueError(f"rows: must be at most {rows} in a step of fixed shape, got {own.rows}")
        tiles = rows + flex_layout.TILES  # a tile has at least a row; one without rows follows
        return replace(own, rows=rows, logit_rows=rows if own.logit_rows else 0, tiles=tiles)


def _padded(count: int, steps: tuple[int, ...]) -> int | None:
    return next((step for step in steps if step >= count), None)


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


class DeviceForward:
    """A `Forward` on a CUDA device, where launches are slow: few shapes, one copy to the device per step.

    Steps are padded to few shapes: kernels recur and, with `graphs`, can be recorded. Padding rows write to
    the pool's scratch block and attend to nothing. Larger steps run unpadded; a fixed shape refuses them.
    """

    kind = "transformers"

    def __init__(self, module: Any, attention: FlexAttention, shapes: Shapes, graphs: Graphs | None) -> None:
        self.attention = attention
        self._module = module
        self._shapes = shapes
        self._graphs = graphs
        self._device = attention.pool.keys.device

    def __call__(
        self,
        spans: Sequence[Span],
        tokens: Sequence[int],
        logit_rows: Sequence[int],
        residuals: Residuals = UNTOUCHED,
    ) -> Tensor:
        pages = self.attention.lay_out(spans)
        slots = self.attention.slots(spans)
        listed = self._shapes.of(pages, len(logit_rows), slots)
        shape = listed or flex_layout.exact(pages, len(logit_rows), slots)
        given = [self.attention.pack(shape, pages, tokens, logit_rows)]
        if residuals.added is not None:
            given.append(functional.pad(residuals.added, (0, 0, 0, shape.rows - len(tokens))))

        def body(buffer: Tensor, added: Tensor | None = None) -> Tensor:
            placed = self.attention.place(shape, buffer)
            inputs = placed.inputs
            rows = inputs.tokens.long()[None], inputs.positions.long()[None]
            read = Residuals(residuals.layers, None, added)
            logits = run_module(self._module, self.attention, placed, *rows, inputs.logit_rows.long(), read)
            if not read.layers:
                return logits
            # One tensor, as a recording keeps it.
            return torch.cat([read.states().float().flatten(), logits.flatten()])

        if listed is None or self._graphs is None:
            result = body(*(part.to(self._device, non_blocking=True) for part in given))
        else:
            result = self._graphs.run((shape, residuals.layers, len(given)), given, body)
        if residuals.layers:
            result = self._without_states(result, shape, residuals)
        return result[: len(logit_rows)]

    def _without_states(self, result: Tensor, shape: StepShape, residuals: Residuals) -> Tensor:
        """Return the logits of a result that begins with the states of all its rows; take those wanted."""
        config = self._module.config
        states = shape.rows, len(residuals.layers), config.hidden_size
        size = math.prod(states)
        residuals.take(result[:size].view(states))
        logits = result[size:]
        return logits.view(shape.logit_rows, -1) if shape.logit_rows else logits.view(0, config.vocab_size)
